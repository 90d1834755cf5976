"""LowBitSGD against torch's SGD in fp32, in every codec, and within its bound where weights are stored as codes."""

import math

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize, memory_report
from octet.worker.optim import LowBitSGD, SGDHyperparameters
from octet.worker.optim.rules.sgd import SGD
from tests.kit.stored_weights import KINDS, stored_weight
from tests.numerics.measure import relative_error
from tests.worker.optim.test_lion import gaussian, small_model, train


def step_through(parameter: Tensor, optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("maximize", [False, True])
def test_fp32_is_torchs(momentum: float, decay: float, maximize: bool) -> None:
    weight, gradients = gaussian(64, 100), [gaussian(64, 100, seed=seed) for seed in range(1, 8)]
    ours, theirs = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    options = SGDHyperparameters(0.05, momentum, weight_decay=decay, maximize=maximize, exp_avg_codec="fp32")
    step_through(ours, LowBitSGD([ours], options), gradients)
    reference = torch.optim.SGD([theirs], lr=0.05, momentum=momentum, weight_decay=decay, maximize=maximize)
    step_through(theirs, reference, gradients)
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-8)


def test_gradients_are_clamped_as_torchs_clip_grad_value() -> None:
    ours, theirs = nn.Parameter(gaussian(64, 100)), nn.Parameter(gaussian(64, 100))
    optimizer = LowBitSGD([ours], SGDHyperparameters(0.1, max_gradient=0.02, exp_avg_codec="fp32"))
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for seed in range(1, 6):
        ours.grad, theirs.grad = (gaussian(64, 100, seed=seed) for _ in range(2))
        nn.utils.clip_grad_value_([theirs], 0.02)
        optimizer.step(), reference.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("codec", SGD.state_codecs["exp_avg"])
def test_every_codec_follows_fp32(codec: str) -> None:
    wide, stored = nn.Parameter(torch.zeros(64, 128)), nn.Parameter(torch.zeros(64, 128))
    gradients = [gaussian(64, 128) + gaussian(64, 128, seed=seed) for seed in range(1, 20)]
    step_through(wide, LowBitSGD([wide], SGDHyperparameters(1e-2, exp_avg_codec="fp32")), gradients)
    step_through(stored, LowBitSGD([stored], SGDHyperparameters(1e-2, exp_avg_codec=codec)), gradients)
    assert relative_error(stored.detach(), wide.detach()) < 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_weight_keeps_a_drift_and_never_saturates(kind: str) -> None:
    """The largest gradient in every element, so that each step is as large as the bound allows."""
    values = gaussian(64, 256)
    weight = stored_weight(values, kind)
    wide = nn.Parameter(weight.dequantize())
    defaults = SGDHyperparameters(1e-3, max_gradient=0.5, exp_avg_codec="fp32")
    stored, reference = LowBitSGD([weight], defaults), LowBitSGD([wide], defaults)
    for _ in range(30):
        step_through(weight, stored, [torch.full_like(values, -0.5)])
        step_through(wide, reference, [torch.full_like(values, -0.5)])
        assert float(weight.dequant_scale) * (65504 if kind == "fp16" else 448) >= float(wide.detach().abs().amax())
    torch.testing.assert_close(weight.dequantize(), wide.detach(), rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize("level", ["fp32", "O2", "O3-split-8bit"])
def test_trains_at_a_level(level: str) -> None:
    model = small_model()
    model, optimizer = initialize(model, LowBitSGD(model.parameters(), SGDHyperparameters(0.3)), opt_level=level)
    assert isinstance(optimizer, LowBitSGD)
    assert optimizer.param_groups[0]["exp_avg_codec"] == LEVELS[level].exp_avg
    losses = train(model, optimizer, range(30))
    assert losses[-1] < 0.9 * losses[0]
    held = memory_report(model, optimizer)
    assert held["exp_avg"] > 0
    assert held["exp_avg_sq"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum is 1.0; allowed: from 0"),
        ({"max_gradient": math.inf}, "max_gradient is inf; allowed: above 0 and finite"),
    ],
)
def test_what_has_no_bound_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowBitSGD(small_model().parameters(), SGDHyperparameters(**options))
