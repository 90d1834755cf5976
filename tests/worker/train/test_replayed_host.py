"""The host's work in a replayed step: a few ops whatever the model's depth, and a little Python for each layer."""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octet.api_schemas.models.gpt import gpt_sizes
from octet.worker import initialize
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.metrics.table import Metrics
from octet.worker.models.gpt import GPT
from octet.worker.optim import fused as fused_step
from octet.worker.optim.clip import clip_grad_norm_
from octet.worker.train import step_graph
from octet.worker.train.step_graph import StepGraph
from tests.kit.tape import optimizer_by_kernels

MOST_OPS = 10
"""Three copies: tokens, targets, and a table with the new learning rate, which is made and gone through in an op each. The loss
divisor, copies of two results, and the two of torch's profiler in `zero_grad`."""
MOST_CALLS_PER_BLOCK = 100
"""Calls of Python functions for a block's four layers. They check each layer's state, and if its next step is sampled."""


class Ops(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class OneLaunch:
    """A recorder whose replay is one launch of the host, as that of a CUDA graph is; here it does nothing."""

    num_replays = 0

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        return work(), self._replay

    def forget(self) -> None:
        raise AssertionError("no state changes here")

    def _replay(self) -> None:
        self.num_replays += 1


def launch_nothing(*_arguments: Any) -> None:
    """Stand for a launch, where the host's part ends. Triton's interpreter would run the kernels for a minute."""


def replayed(num_layers: int) -> tuple[Counter[str], int]:
    """The ops of a replayed step, and its calls of Python functions."""
    torch.manual_seed(0)
    model = GPT(gpt_sizes(32, num_layers, 2, 32, 16))
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), "O2", auto_filter=False, statistics_every=4)
    parameters, metrics, recorder = list(model.parameters()), Metrics(), OneLaunch()
    graph = StepGraph(model, optimizer, model.octet_report.health, recorder)
    samples = {name: torch.zeros(1, 16, dtype=torch.int64) for name in ("tokens", "targets")}

    def step(number: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number)
        graph.begin_step()
        graph.forward_backward(samples, 1.0, metrics, is_first=True)
        graph.update(lambda max_norm: clip_grad_norm_(parameters, max_norm), 1.0)
        optimizer.zero_grad()
        graph.after_step()

    for number in range(6):  # 0 and 4 sample; 1 is the first of its state, 2 is recorded, 3 and 5 are replayed
        step(number)
    assert recorder.num_replays > 0
    before, calls = recorder.num_replays, 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with Ops() as ops:
        sys.setprofile(count)
        try:
            step(6)
        finally:
            sys.setprofile(None)
    assert recorder.num_replays == before + 2
    return ops.found, calls


def test_a_replayed_step_takes_the_same_ops_at_any_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "WARM_UP_STEPS", 1)
    launched = mock.patch.object(fused_step.kernel, "launch", launch_nothing)
    with cpu_as_accelerator(), optimizer_by_kernels(), launched:
        replayed(1)  # what torch does only once in a process
        (ops, calls), (deeper_ops, deeper_calls) = replayed(1), replayed(3)
    assert ops == deeper_ops
    assert 0 < ops.total() <= MOST_OPS
    assert (deeper_calls - calls) / 2 <= MOST_CALLS_PER_BLOCK
