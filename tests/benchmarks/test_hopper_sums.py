"""The imitation of Hopper's sums cuts what an accumulator of 14 bits cannot hold, and only where a product asks for it."""

import pytest
import torch
from torch import Tensor, nn

from benchmarks.hopper_sums import EMPTIED_AFTER, STEP, hopper_sums, short_sums
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.recipe import RecipeSpec
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.recipe import Recipe
from octet.worker.fp8.weights import encode_weight


@pytest.mark.parametrize(("added", "expected"), [(2.0**-13, 1 + 2.0**-13), (2.0**-14, 1.0), (-(2.0**-15), 1 - 2.0**-14)])
def test_an_accumulator_keeps_13_bits_after_the_first(added: float, expected: float) -> None:
    values, ones = torch.zeros(1, 2 * STEP), torch.ones(1, 2 * STEP)
    values[0, 0], values[0, STEP] = 1.0, added
    assert short_sums(values, ones).item() == expected


def gradients(level: str, *, is_fast: bool, num_out: int) -> list[Tensor]:
    """Return a layer's output and the gradients of its input and weight."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, num_out, bias=False)
    linear.weight.data = torch.randn(num_out, 64, generator=generator)
    recipe = Recipe.resolve(RecipeSpec(fast_grad_input=is_fast))
    layer = Float8Linear(linear, recipe, encode_weight(linear.weight, LEVELS[level]))
    input = torch.randn(48, 64, generator=generator).requires_grad_()
    output = layer(input)
    output.backward(torch.randn(48, num_out, generator=generator))
    assert input.grad is not None
    assert layer.weight.grad is not None
    return [output.detach(), input.grad, layer.weight.grad]


@pytest.mark.parametrize("level", ["te", "O2"])
def test_the_option_changes_long_sums_of_input_gradients_alone(level: str) -> None:
    exact = gradients(level, is_fast=False, num_out=8 * EMPTIED_AFTER)
    assert all(map(torch.equal, exact, gradients(level, is_fast=True, num_out=8 * EMPTIED_AFTER))), "a CPU sums in fp32"
    with hopper_sums():
        precise, fast = (gradients(level, is_fast=is_fast, num_out=8 * EMPTIED_AFTER) for is_fast in (False, True))
        short = [gradients(level, is_fast=is_fast, num_out=EMPTIED_AFTER) for is_fast in (False, True)]
    assert [torch.equal(a, b) for a, b in zip(precise, fast, strict=True)] == [True, False, True]
    errors = [float((each[1] - exact[1]).norm() / exact[1].norm()) for each in (precise, fast)]
    assert 0 < 2 * errors[0] < errors[1] < 0.005
    assert all(map(torch.equal, *short)), "the accumulator is emptied once"
    assert all(map(torch.equal, exact, gradients(level, is_fast=True, num_out=8 * EMPTIED_AFTER))), "the ops are restored"
