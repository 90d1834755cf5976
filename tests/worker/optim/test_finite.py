"""The check that all gradients are finite. It decides if an optimizer steps."""

import math

import pytest
import torch
from torch import Tensor

from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.optim.gradients import all_finite
from tests.worker.fp8.test_products import Names


@pytest.mark.parametrize("as_cuda", [False, True])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(4))
def test_one_element_that_is_not_finite_is_seen(
    monkeypatch: pytest.MonkeyPatch, as_cuda: bool, bad: float | None, place: int
) -> None:
    """Also beside values whose squares are beyond fp32. Wide gradients of a CUDA device are looked through by one op."""
    values = [torch.full((3, 5), 3e38), torch.ones(7).bfloat16(), torch.zeros(4, 6).t(), torch.ones(2, 2)]
    if bad is not None:
        values[place].view(-1)[-1:].fill_(bad) if values[place].is_contiguous() else values[place][0].fill_(bad)
    gradients: list[Tensor] = [*values[:3], Float8Gradient.quantize(values[3], RoundingPosition(0, 0))]
    if as_cuda:
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda _tensor: True))
    with Names() as seen:
        found = all_finite(iter(gradients))
    assert found.dtype == torch.bool
    assert found.shape == ()
    assert bool(found) == (bad is None)
    assert seen.names.count("total_norm") == as_cuda
    assert seen.names.count("all_finite") == (0 if as_cuda else 3)


def test_no_gradient_is_finite() -> None:
    assert bool(all_finite([]))
