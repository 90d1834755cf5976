"""Averages of weights are those of their values, at every level."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from octet.api_schemas.levels import LEVELS
from octet.worker import AveragedModel, initialize
from tests.kit.small_model import spread
from tests.kit.stored_weights import KINDS, stored_weight

DECAY = 0.8


def make(level: str, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 48))
    return initialize(model, torch.optim.AdamW(model.parameters(), lr=0.2), opt_level=level, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
    (model(x) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    """The values of every parameter, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["ema", "swa"])
@pytest.mark.parametrize("level", ["fp32", *spread(level for level in LEVELS if level != "fp32")])
def test_the_average_is_that_of_the_values(level: str, kind: str) -> None:
    model, optimizer = make(level)
    average = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY) if kind == "ema" else None)
    expected: dict[str, Tensor] = {}
    for step in range(6):
        train(model, optimizer, step)
        average.update_parameters(model)
        for name, value in values(model).items():
            weight = 0.0 if step == 0 else DECAY if kind == "ema" else step / (step + 1)
            expected[name] = expected.get(name, value) * weight + value * (1 - weight)
    assert int(average.n_averaged) == 6
    found = values(average.module)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(9))
    reference = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 48)).eval()
    reference.load_state_dict(expected | {name: buffer for name, buffer in model[3].named_buffers(prefix="3")})
    output, wanted = average.eval()(x), reference(x)
    assert ((output - wanted).norm() / wanted.norm()).item() < (
        1e-6 if level == "fp32" else 0.08
    )  # 3.8 % a product in E4M3, three of them


@pytest.mark.parametrize("level", ["te", "O2", "O3", "O3-split"])
def test_a_state_of_the_average_continues_it(level: str) -> None:
    model, optimizer = make(level)
    first, second = AveragedModel(model), AveragedModel(model)
    for step in range(4):
        train(model, optimizer, step)
        first.update_parameters(model)
        if step == 1:
            buffer = io.BytesIO()
            torch.save(first.state_dict(), buffer)
            buffer.seek(0)
            second.load_state_dict(torch.load(buffer, weights_only=True))
        if step > 1:
            second.update_parameters(model)
    for (name, one), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(one.nan_to_num(nan=-1.0), other.nan_to_num(nan=-1.0)), name


def test_an_averaging_function_and_buffers() -> None:
    model, optimizer = make("O2", recipe={"scaling": "delayed", "amax_history_length": 2})
    average = AveragedModel(model, avg_fn=lambda averaged, value, _count: averaged * 0.5 + value * 0.5, use_buffers=True)
    means = []
    for step in range(2):
        train(model, optimizer, step)
        average.update_parameters(model)
        means.append(model[3].running_mean.clone())
    torch.testing.assert_close(average.module[3].running_mean, (means[0] + means[1]) / 2)
    with pytest.raises(ValueError, match="both avg_fn and multi_avg_fn"):
        AveragedModel(model, avg_fn=lambda *_: None, multi_avg_fn=lambda *_: None)


def test_the_model_is_left_alone_and_the_average_trains_on_as_a_model_of_its_own() -> None:
    model, _ = make("O3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    average = AveragedModel(model)
    average.update_parameters(model)
    assert isinstance(average, swa_utils.AveragedModel)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8)), name
    average(torch.ones(4, 32)).sum().backward()
    assert average.module[0].weight.grad.dtype == average.module[0].weight.dtype == torch.float32
    assert type(average.module[0].weight.grad) is Tensor


@pytest.mark.parametrize("kind", ["ema", "swa"])
@pytest.mark.parametrize("level", spread(LEVELS))
def test_torchs_own_is_ours(level: str, kind: str) -> None:
    """It holds codes, with the fp32 average beside them."""
    model, optimizer = make(level)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(model), torch.load(buffer, weights_only=False)]
    assert all(torch.equal(twin.eval()(torch.ones(2, 32)), model.eval()(torch.ones(2, 32))) for twin in twins)
    model.train()
    averaging = swa_utils.get_ema_multi_avg_fn(DECAY) if kind == "ema" else None
    average, ours = (each(model, multi_avg_fn=averaging) for each in (swa_utils.AveragedModel, AveragedModel))
    for step in range(3):
        train(model, optimizer, step)
        average.update_parameters(model)
        ours.update_parameters(model)
    wanted, found, present = values(ours.module), values(average.module), values(model)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(found[name], present[name], rtol=1e-3)


def by_assignment(average: Tensor, target: Tensor) -> None:
    average.copy_(average * 0.999 + target * 0.001)


def by_data(average: Tensor, target: Tensor) -> None:
    average.data = average.data * 0.999 + target * 0.001


def in_place(average: Tensor, target: Tensor) -> None:
    average.lerp_(target, 0.001)


@pytest.mark.parametrize("update", [by_assignment, by_data, in_place])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_average_by_hand_loses_nothing(kind: str, update: Callable[[Tensor, Tensor], None]) -> None:
    """Each change is below half a code: rounded to nearest every time, the average would stay where it was."""
    start = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    average = stored_weight(start, kind)
    expected, target = average.dequantize(), start * 1.1
    with torch.no_grad():
        for _ in range(50):
            update(average, target)
            update(expected, target)
    torch.testing.assert_close(average.dequantize(), expected, rtol=1e-5, atol=1e-8)


def test_a_decay_in_place_of_the_device_is_refused_with_what_to_pass() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn\(0.99\)"):
        AveragedModel(model, 0.99)  # type: ignore[arg-type]
    average = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.99))
    average.update_parameters(model)
    assert torch.equal(average.module.weight, model.weight)


def test_a_model_with_other_parameters_is_refused() -> None:
    """A stage of a pipeline has fewer of them, and the part of a rank other shapes."""
    model, _ = make("O2")
    average = AveragedModel(model)
    with pytest.raises(ValueError, match="the model has 15 parameters and buffers, and its average 20"):
        average.update_parameters(nn.Sequential(*list(model)[:-1]))
    with pytest.raises(ValueError, match=r"a parameter has shape \(4, 2\) and its average \(3, 2\)"):
        AveragedModel(nn.Linear(2, 3)).update_parameters(nn.Linear(2, 4))
