"""Ranks agree on what they measured: the largest amax and scale, and the mean of samples."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octet.worker import initialize
from octet.worker.fp8.operand import OperandScaling
from octet.worker.mesh import Axis
from octet.worker.optim import LowBitOptimizer
from octet.worker.optim.shards import agree_on_weight_scales
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


class Launches(TorchDispatchMode):
    """Counts ops that are no views."""

    num_launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_launches += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_scales_become_the_largest_of_the_ranks_in_as_many_launches_for_many_weights(stage: Axis, level: str) -> None:
    """The last weight is stepped by other ranks alone, which here hold three times nothing."""
    found = []
    for num_layers in (2, 5):
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(num_layers)))
        made = torch.optim.AdamW(net.parameters())
        model, optimizer = initialize(net, made, level, auto_filter=False, convert_heads=True)
        assert isinstance(optimizer, LowBitOptimizer)
        model(torch.ones(16, 64)).sum().backward()
        optimizer.step()
        weights = list(optimizer.quantized.values())
        is_owned = torch.tensor([*[True] * (num_layers - 1), False])
        before = [(weight.amax.clone(), weight.dequant_scale.clone()) for weight in weights]
        with Launches() as counted:
            agree_on_weight_scales(optimizer, weights, is_owned, stage)
        for weight, numbers, owned in zip(weights, before, is_owned, strict=True):
            assert (weight.amax, weight.dequant_scale) == tuple(OTHER_RANK * number * owned for number in numbers)
        weights[0].amax.fill_(1.0)
        weights[0].dequant_scale.fill_(torch.inf)
        agree_on_weight_scales(optimizer, weights, None, stage)
        assert weights[0].dequant_scale.isnan(), "and so is its master's"
        if level == "O3":
            masters = [optimizer.state[weight.parameter]["master_weights"]["dequant_scale"] for weight in weights]
            assert [bool(master.isnan()) for master in masters] == [True] + [False] * (num_layers - 1)
        found.append(counted.num_launches)
    assert found[0] == found[1]
