"""Dynamic loss scaling: gradients too small for fp16 survive, the loop sees true ones, and the scale finds its level."""

import pytest
import torch
from torch import nn

from octet.worker import initialize
from octet.worker.fp8.loss_scaling import LossScaling
from tests.kit.families import FAMILIES, batch_of, fit_loss_scale


def make() -> tuple[nn.Module, torch.optim.Optimizer, LossScaling]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 1, bias=False))
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), opt_level="fp16-amp")
    (hook,) = model._forward_hooks.values()
    return model, optimizer, hook.__self__


def test_gradients_below_fp16_survive_and_arrive_unscaled() -> None:
    model, _, scaling = make()
    reference = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 1, bias=False))
    reference.load_state_dict({name: value for name, value in model.state_dict().items() if name.endswith("weight")})
    input = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    for network in (model, reference):
        (network(input).mean() * 1e-7).backward()  # below fp16's smallest number, 6e-8, once divided by 8
    assert scaling.loss_scale == 2**16
    gradient, exact = model[0].weight.grad, reference[0].weight.grad
    assert ((gradient - exact).norm() / exact.norm()).item() < 2e-3


def test_what_comes_before_the_model_sees_true_gradients() -> None:
    model, _, _ = make()
    encoder = nn.Linear(16, 32)
    input = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    model(encoder(input)).mean().backward()
    gradient, encoder.weight.grad = encoder.weight.grad, None
    weights = [layer.weight.detach() for layer in model]
    (encoder(input) @ weights[0].T @ weights[1].T).mean().backward()
    assert ((gradient - encoder.weight.grad).norm() / encoder.weight.grad.norm()).item() < 5e-3


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    model, optimizer, scaling = make()
    before = model[0].weight.clone()
    (model(torch.ones(4, 32)).sum() * 1e3).backward()  # 1e3 · 2^16 is above fp16's 65504
    optimizer.step()
    assert optimizer.num_skipped_steps == 1
    assert torch.equal(model[0].weight, before)
    assert scaling.loss_scale == 2**15


def test_the_scale_falls_until_steps_succeed_and_then_trains() -> None:
    model, optimizer, scaling = make()
    for _ in range(30):
        (model(torch.ones(4, 32)).square().mean() * 1e3).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < optimizer.num_skipped_steps < 20
    assert scaling.loss_scale == 2.0 ** (16 - optimizer.num_skipped_steps)
    assert model(torch.ones(4, 32)).abs().mean() < 0.3


def test_the_scale_doubles_after_good_steps_only() -> None:
    scaling = LossScaling(nn.Linear(1, 1), initial_scale=8.0, growth_interval=3)
    scales = []
    for num_skipped in (0, 0, 1, 1, 1, 1, 1):
        scaling.update(torch.tensor(num_skipped))
        scales.append(scaling.loss_scale.item())
    assert scales == [8, 8, 4, 4, 4, 8, 8]


def test_evaluation_is_left_alone() -> None:
    model, _, _ = make()
    with torch.no_grad():
        assert model(torch.ones(1, 32)).grad_fn is None


def test_an_optimizer_that_cannot_skip_is_refused() -> None:
    model = nn.Linear(32, 32)
    with pytest.raises(ValueError, match="fp16-amp cannot hold the states of SGD"):
        initialize(model, torch.optim.SGD(model.parameters()), opt_level="fp16-amp")


@pytest.mark.parametrize("family", ["vit", "roberta"])
def test_gradients_of_wrapped_networks_are_true(family: str) -> None:
    norms = []
    for level in ("fp32", "fp16-amp"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = FAMILIES[family]()
        model, _ = initialize(model, torch.optim.AdamW(model.parameters()), level)
        fit_loss_scale(model)
        model.loss(batch_of(family)).loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(nn.utils.get_total_norm(gradients).item())
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
