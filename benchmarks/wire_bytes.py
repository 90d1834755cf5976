"""Count what each of many ranks sends and holds in a training step, without the ranks.

The step is the library's own (`octet.parallelize`, backward, clip, update), and so are the counters (`octet.worker.mesh.Axis`,
`memory_report`). torch's "fake" backend stands for the other ranks and moves nothing; tensors are fake and have only sizes.
What neither sends nor holds anything is left out (`_without_arithmetic`): a count takes a second or two of the processor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.networks import Way, build_gpt, in_fp8, prepare
from octet.api_schemas.layout import WideDtype
from octet.api_schemas.models.gpt import GPTSizes
from octet.worker import memory_report, parallelize
from octet.worker.optim import walker
from octet.worker.optim.states import OptimizerStates
from octet.worker.planning.fake_gpu import answer_host, fake_tensors
from octet.worker.planning.trace import one_of, with_fake_values

COUNTED_LAYERS = (2, 3)
"""A step of each is counted; each further layer adds their difference. So a model of 96 layers takes seconds.

The first layers are more than one because ZeRO 3 divides layers that repeat.
"""


@dataclass(frozen=True)
class Traffic:
    """One rank's part of a step, in bytes. sent: by collective and dtype. held: by class of memory, while gradients exist."""

    num_parameters: int
    sent: Mapping[tuple[str, str], float]
    held: Mapping[str, float]

    def sent_by(self, *collectives: str) -> float:
        """Bytes that the rank sends by some collectives; by all if none is named."""
        return sum(num_bytes for (name, _), num_bytes in self.sent.items() if not collectives or name in collectives)


def count(sizes: GPTSizes, level: str, zero_stage: int, num_ranks: int, wide: WideDtype = "fp32") -> Traffic:
    """Count one step of a GPT with one micro-batch, as the first of `num_ranks` data parallel ranks.

    wide: dtype in which gradients travel that are not in FP8, and fp32 weights at ZeRO 3.
    """
    found = _count_in_bf16(sizes, level, zero_stage, num_ranks)
    return found if wide == "bf16" else _in_fp32(found)


@cache
def _count_in_bf16(sizes: GPTSizes, level: str, zero_stage: int, num_ranks: int) -> Traffic:
    first, second = (
        count_whole(sizes.model_copy(update={"num_layers": layers}), level, zero_stage, num_ranks, "bf16")
        for layers in COUNTED_LAYERS
    )
    num_more = (sizes.num_layers - COUNTED_LAYERS[0]) / (COUNTED_LAYERS[1] - COUNTED_LAYERS[0])
    sent = {key: first.sent.get(key, 0) + num_more * (value - first.sent.get(key, 0)) for key, value in second.sent.items()}
    held = {key: first.held.get(key, 0) + num_more * (value - first.held.get(key, 0)) for key, value in second.held.items()}
    num_parameters = first.num_parameters + num_more * (second.num_parameters - first.num_parameters)
    return Traffic(round(num_parameters), sent, held)


def _in_fp32(found: Traffic) -> Traffic:
    """Return the bytes sent if all bf16 traffic were fp32. Nothing else differs."""
    sent: dict[tuple[str, str], float] = {}
    for (name, dtype), num_bytes in found.sent.items():
        key, factor = ((name, "float32"), 2) if dtype == "bfloat16" else ((name, dtype), 1)
        sent[key] = sent.get(key, 0) + factor * num_bytes
    return Traffic(found.num_parameters, sent, found.held)


def count_whole(sizes: GPTSizes, level: str, zero_stage: int, num_ranks: int, wide: WideDtype = "fp32") -> Traffic:
    """Count every layer; `count` extrapolates from two and three."""
    with one_of(num_ranks), fake_tensors(), _HostReads(), _without_arithmetic():
        return step(sizes, level, zero_stage, wide, num_steps=1)


def step(sizes: GPTSizes, level: str, zero_stage: int, wide: WideDtype = "fp32", num_steps: int = 2) -> Traffic:
    """Take steps as a rank of the default process group, and count the last; the first makes states.

    num_steps: one is enough, since no step sends or holds something else than the first; a test compares.
    """
    model, optimizer = prepare(build_gpt(sizes, torch.device("cpu")), Way(level, level, options=in_fp8(level)))
    parallel = parallelize(model, optimizer, zero_stage=zero_stage, wide_communication=wide)
    tokens_BT = torch.zeros(1, sizes.max_sequence_length + 1, dtype=torch.int64)
    held: Mapping[str, float] = {}
    for _ in range(num_steps):
        optimizer.zero_grad()
        parallel.data.sent_bytes.clear()
        model.loss({"tokens": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:]}).loss.backward()
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        held = memory_report(model, optimizer)
    return Traffic(sum(parameter.numel() for parameter in model.parameters()), dict(parallel.data.sent_bytes), held)


class _HostReads(TorchDispatchMode):
    """Answer the host's reads of fake tensors, which have no values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = answer_host(self, func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


@contextmanager
def _without_arithmetic() -> Iterator[None]:
    """Leave out the optimizer's arithmetic, which a CPU takes in thousands of short runs; states are allocated as ever."""

    def allocate(optimizer: OptimizerStates, parameter: Tensor, group: dict[str, Any]) -> None:
        if not optimizer.state[parameter]:
            optimizer.allocate(parameter, group)

    with mock.patch.object(walker, "update", allocate), with_fake_values():
        yield
