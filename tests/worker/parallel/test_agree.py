"""Ranks that hold the same layers agree on what they measured: the largest amax, and the mean of samples."""

import pytest
import torch
from torch import Tensor, nn

from octet.worker import initialize
from octet.worker.fp8.operand import OperandScaling
from octet.worker.mesh import Axis
from octet.worker.parallel.parallel import agree_on_amaxes

OTHER_RANK = 3.0
"""The factor by which everything is larger on the other rank."""


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Axis:
    """An axis of two ranks; the other one has the same tensors, times OTHER_RANK."""
    axis = Axis("stage", 2, 0, torch.device("cpu"))
    monkeypatch.setattr(axis, "sum_", lambda flat: flat.add_(OTHER_RANK * flat))
    monkeypatch.setattr(axis, "max_", lambda flat: flat.mul_(OTHER_RANK))
    return axis


def scalings(recipe: dict[str, object]) -> tuple[nn.Module, list[OperandScaling]]:
    """A converted layer after a forward and a backward pass, and the scalings of its operands."""
    torch.manual_seed(0)
    model, _ = initialize(nn.Sequential(nn.Linear(32, 32)), None, "te", recipe=recipe, statistics_every=1, auto_filter=False)
    model(torch.randn(16, 32)).sum().backward()
    return model, [module for module in model.modules() if isinstance(module, OperandScaling)]


def copied(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def test_samples_become_the_mean_of_the_ranks(stage: Axis) -> None:
    model, found = scalings({"scaling": "current"})
    before = copied([scaling.sample for scaling in found])
    agree_on_amaxes(model, stage, {})
    for scaling, own in zip(found, before, strict=True):
        assert own.isfinite().all()
        torch.testing.assert_close(scaling.sample, own * (1 + OTHER_RANK) / 2)


def test_amaxes_become_the_largest_of_the_ranks(stage: Axis) -> None:
    model, found = scalings({"scaling": "delayed", "amax_history_length": 4})
    before = copied([scaling.step_amax for scaling in found])
    agree_on_amaxes(model, stage, {})
    for scaling, own in zip(found, before, strict=True):
        assert own > 0
        torch.testing.assert_close(scaling.step_amax, OTHER_RANK * own)
