"""Dynamic loss scaling: gradients too small for fp16 survive, the loop sees true ones, and the scale finds its level."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


def penalty_of(model: nn.Module) -> Tensor:
    return 0.1 * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def whole(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True)


def by_layers(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


PASSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda model, x: model(x),
    "twice": lambda model, x: model(x) + model(2 * x),
    "on itself": lambda model, x: model(model(x).expand(8, 32) + x),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant checkpoint": whole,
}


def penalties() -> list[Any]:
    """Each way for each kind of pass; in `make test` those in one sum, and all of a plain pass."""
    ways = ("not", "in one sum", "alone", "before")
    in_every_run = [(name, way) for name in PASSES for way in ways if name == "plain" or way == "in one sum"]
    marks = {
        case: () if case in in_every_run else pytest.mark.matrix for case in ((name, way) for name in PASSES for way in ways)
    }
    return [pytest.param(*case, marks=mark) for case, mark in marks.items()]


@pytest.mark.parametrize(("name", "penalized"), penalties())
def test_a_penalty_of_parameters_keeps_its_gradient(name: str, penalized: str) -> None:
    """It was never multiplied by the loss scale, in whichever backward pass it comes."""
    model, _, scaling = make()
    scaling.state[0] = 2.0**10  # nothing overflows
    reference = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 1, bias=False))
    reference.load_state_dict({name: value for name, value in model.state_dict().items() if name.endswith("weight")})
    input = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = []
    for network in (model, reference):
        input.grad = None
        before = penalty_of(network)
        loss = PASSES[name](network, input).square().mean()
        penalty = before if penalized == "before" else penalty_of(network)
        if penalized in ("in one sum", "before"):
            (loss + penalty).backward()
        else:
            loss.backward()
            if penalized == "alone":
                penalty.backward()
        found.append([*(parameter.grad for parameter in network.parameters()), input.grad])
    for gradient, exact in zip(*found, strict=True):
        assert ((gradient - exact).norm() / exact.norm()).item() < 5e-3


def test_blocks_in_reentrant_checkpoints_get_true_gradients() -> None:
    """Passes within the backward pass, which sees one node of each block."""

    class Blocks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return by_layers(self, x)

    found = []
    input = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for level in (None, "fp16-amp"):
        torch.manual_seed(0)
        model: nn.Module = Blocks(nn.Linear(32, 32, bias=False), nn.Linear(32, 32), nn.Linear(32, 1, bias=False))
        if level is not None:
            model, _ = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), level)
        (model(input).square().mean() + penalty_of(model)).backward()
        penalty_of(model).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for gradient, exact in zip(*found, strict=True):
        assert ((gradient - exact).norm() / exact.norm()).item() < 5e-3


class InHalf(torch.autograd.Function):
    """A product of others, whose gradient of the weight is fp16 for an fp32 parameter; autograd casts it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad_output @ weight.t(), (x.t() @ grad_output).half()


def test_gradients_that_arrive_in_fp16_are_divided_in_fp32() -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(16, 16), nn.Parameter(torch.eye(16))

        def forward(self, x: Tensor) -> Tensor:
            return InHalf.apply(self.first(x), self.weight) + InHalf.apply(x, self.weight)

    model, _ = initialize(model := Theirs(), torch.optim.AdamW(model.parameters()), "fp16-amp", convert_heads=True)
    input = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = (model.first(input) + input).t() @ torch.full((8, 16), 1e-9)
    (model(input).sum() * 1e-9 + model.weight.sum() * 1e-7).backward()  # divided in fp16 it would be zero
    torch.testing.assert_close(model.weight.grad, exact + 1e-7, rtol=2e-3, atol=1e-11)
