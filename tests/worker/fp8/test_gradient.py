"""The FP8 gradient: what torch does to gradients works on its codes, and accumulation loses nothing on average."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.worker import initialize
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.gradient_hooks import keep_gradient_in_fp8
from octet.worker.fp8.rounding_position import RoundingPosition


def make(values: Tensor) -> Float8Gradient:
    return Float8Gradient.quantize(values, RoundingPosition(seed=0, stream=0))


def parameter_with(values: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(values))
    parameter.grad = make(values)
    return parameter


def random_values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_backward_leaves_codes_behind() -> None:
    parameter = nn.Parameter(random_values(8, 16))
    keep_gradient_in_fp8(parameter, RoundingPosition(seed=0, stream=0))
    (parameter**2).sum().backward()
    assert isinstance(parameter.grad, Float8Gradient)
    assert parameter.grad.dtype == torch.float32
    assert parameter.grad.codes.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(parameter.grad.dequantize(), 2 * parameter.detach(), rtol=2**-4, atol=2**-9)


@pytest.mark.parametrize("order", [2.0, 3.0])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_agrees_with_torch_on_the_decoded_values(foreach: bool | None, order: float) -> None:
    """Gradients of both kinds, in turns and each of its own size: none may get another's norm."""
    parameters = [parameter_with(100 * random_values(4, 32)), nn.Parameter(torch.zeros(3))]
    parameters += [parameter_with(random_values(8, 16)), nn.Parameter(torch.zeros(5))]
    parameters[1].grad, parameters[3].grad = random_values(3, seed=1), 10 * random_values(5, seed=2)
    wide = [nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
    for reference, narrow in zip(wide, parameters, strict=True):
        reference.grad = narrow.grad + 0
    codes = parameters[0].grad.codes.clone()
    norms = torch._foreach_norm([parameter.grad for parameter in parameters], order)
    torch.testing.assert_close(norms, tuple(torch.linalg.vector_norm(reference.grad, order) for reference in wide))
    norm = nn.utils.clip_grad_norm_(parameters, 1.0, order, foreach=foreach)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(wide, 1.0, order))
    for narrow, reference in zip(parameters, wide, strict=True):
        torch.testing.assert_close(narrow.grad + 0, reference.grad)
    assert torch.equal(parameters[0].grad.codes.view(torch.uint8), codes.view(torch.uint8))


def test_small_contributions_survive_accumulation() -> None:
    """64 micro-batches, each 1/64 of the first: round-to-nearest E4M3 would stay at 1."""
    gradient = make(torch.ones(4096))
    for _ in range(64):
        gradient.add_(torch.full((4096,), 1 / 64))
    assert gradient.dequantize().mean().item() == pytest.approx(2.0, rel=0.01)


def test_accumulation_draws_new_random_numbers_each_time_and_the_same_ones_after_a_resume() -> None:
    def accumulate(count: int) -> tuple[Float8Gradient, Float8Gradient]:
        pair = make(random_values(256)), make(random_values(256))
        pair[0].position.count = pair[1].position.count = count
        for gradient in pair:
            gradient.add_(random_values(256, seed=1))
        return pair

    first, again = accumulate(5)
    assert torch.equal(first.codes.view(torch.uint8), again.codes.view(torch.uint8))
    later, _ = accumulate(6)
    assert not torch.equal(first.codes.view(torch.uint8), later.codes.view(torch.uint8))
    assert first.position.count == 6


def test_draws_go_on_after_a_part_of_a_run_that_accumulates_in_fp32() -> None:
    """An elastic job with fewer ranks has more micro-batches, which `gradient_accumulation: auto` adds up in fp32."""

    def begin(accumulation: str, state: dict[str, Tensor] | None) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
        model, optimizer = initialize(
            network, torch.optim.AdamW(network.parameters()), "O2", gradient_accumulation=accumulation
        )
        if state is not None:
            model.load_state_dict(state)
        return model, optimizer

    def count_of(model: Any) -> list[int]:
        return [layer.gradient_position.count for layer in model]

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = begin("fp8", None)
    step(model, optimizer)
    first = count_of(model)
    assert first == [2, 2]
    model, optimizer = begin("fp32", model.state_dict())
    step(model, optimizer)
    model, optimizer = begin("fp8", model.state_dict())
    assert count_of(model) == first
    step(model, optimizer)
    assert count_of(model) == [4, 4]


def test_a_non_finite_gradient_shows_in_the_norm() -> None:
    values = random_values(4, 4)
    values[1, 2] = torch.inf
    parameter = parameter_with(values)
    assert not torch.isfinite(nn.utils.clip_grad_norm_([parameter], 1.0))
    gradient = make(random_values(4, 4))
    gradient.add_(values)
    assert not torch.isfinite(torch.linalg.vector_norm(gradient))


def test_copies_and_zeroing() -> None:
    gradient = make(random_values(4, 4))
    duplicate = copy.deepcopy(gradient)
    gradient.zero_()
    assert not gradient.dequantize().any()
    assert duplicate.dequantize().any()
    assert isinstance(duplicate, Float8Gradient)


@pytest.mark.parametrize(("num_ranks", "largest_error"), [(8, 0.02), (64, 0.007)])
def test_the_rounding_errors_of_ranks_average_out(num_ranks: int, largest_error: float) -> None:
    """Each of 4 micro-batches but the first is added with stochastic rounding. With the same numbers on all ranks: 3.7 %."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(64, 64, generator=generator)
    means = {}
    for name, num_shares in (("own", num_ranks), ("same", 1)):
        total, exact = torch.zeros(64, 64), torch.zeros(64, 64)
        for rank in range(num_ranks):
            position = RoundingPosition(seed=0, stream=0, share=rank % num_shares, num_shares=num_shares)
            gradients = [shared + torch.randn(64, 64, generator=generator) / 10 for _ in range(4)]
            held = Float8Gradient.quantize(gradients[0], position)
            for gradient in gradients[1:]:
                held.add_(gradient)
            total, exact = total + held.dequantize(), exact + sum(gradients[1:], gradients[0])
        means[name] = ((total - exact).norm() / exact.norm()).item()
    assert means["own"] <= largest_error
    assert means["same"] >= 0.035


def test_no_two_ranks_draw_the_same_numbers() -> None:
    positions = [RoundingPosition(seed=3, stream=5, share=share, num_shares=4) for share in range(4)]
    cpu = torch.device("cpu")
    draws = [tuple(map(int, position.next_draw(cpu))) for _ in range(10) for position in positions]
    assert len(set(draws)) == 40
    assert tuple(map(int, RoundingPosition(3, 5).next_draw(cpu))) == (3, 1, 5), "one rank draws as before"
