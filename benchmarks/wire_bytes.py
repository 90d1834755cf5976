"""Count what each of many ranks sends and holds in a training step, without the ranks.

The step is the library's own (`octet.parallelize`, backward, clip, update), and so are the counters (`worker.mesh.Axis`,
`memory_report`). torch's "fake" backend stands for the other ranks and moves nothing; tensors are fake and have only sizes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from api_schemas.models.gpt import GPTSizes
from api_schemas.resources import WideDtype
from benchmarks.gpu.fake_gpu import answer_host, fake_tensors
from benchmarks.gpu.live_bytes import LiveBytes
from benchmarks.gpu.networks import Way, build_gpt, in_fp8, prepare
from worker import memory_report, parallelize

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


@cache
def count(sizes: GPTSizes, level: str, zero_stage: int, num_ranks: int, wide: WideDtype = "fp32") -> Traffic:
    """Count one step of a GPT with one micro-batch, as the first of `num_ranks` data parallel ranks.

    wide: dtype in which gradients travel that are not in FP8, and fp32 weights at ZeRO 3.
    """
    first, second = (
        count_whole(sizes.model_copy(update={"num_layers": layers}), level, zero_stage, num_ranks, wide)
        for layers in COUNTED_LAYERS
    )
    num_more = (sizes.num_layers - COUNTED_LAYERS[0]) / (COUNTED_LAYERS[1] - COUNTED_LAYERS[0])
    sent = {key: first.sent.get(key, 0) + num_more * (value - first.sent.get(key, 0)) for key, value in second.sent.items()}
    held = {key: first.held.get(key, 0) + num_more * (value - first.held.get(key, 0)) for key, value in second.held.items()}
    num_parameters = first.num_parameters + num_more * (second.num_parameters - first.num_parameters)
    return Traffic(round(num_parameters), sent, held)


def count_whole(sizes: GPTSizes, level: str, zero_stage: int, num_ranks: int, wide: WideDtype = "fp32") -> Traffic:
    """As `count`, with every layer."""
    with _first_of(num_ranks), fake_tensors(), LiveBytes(see_within=answer_host):
        return step(sizes, level, zero_stage, wide)


def step(sizes: GPTSizes, level: str, zero_stage: int, wide: WideDtype = "fp32") -> Traffic:
    """Take two steps as a rank of the default process group, and count the second; the first makes states."""
    model, optimizer = prepare(build_gpt(sizes, torch.device("cpu")), Way(level, level, options=in_fp8(level)))
    parallel = parallelize(model, optimizer, zero_stage=zero_stage, wide_communication=wide)
    tokens_BT = torch.zeros(1, sizes.max_sequence_length + 1, dtype=torch.int64)
    for _ in range(2):
        parallel.data.sent_bytes.clear()
        model.loss({"tokens": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:]}).loss.backward()
        held = memory_report(model, optimizer)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return Traffic(sum(parameter.numel() for parameter in model.parameters()), dict(parallel.data.sent_bytes), held)


@contextmanager
def _first_of(num_ranks: int) -> Iterator[None]:
    """A process group of which only this rank exists."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
