"""The kernel that normalizes, and its twin, against fp64: within a few units in the last place."""

import math

import pytest
import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.kernels import reference
from octet.worker.kernels.cuda import language, normalization

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter, about NaN and overflow
DEVICE = "cpu" if language.INTERPRETED.value else "cuda"
ULP = 2.0**-23


def operands(num_rows: int, num_columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of their own magnitude and mean, a weight and a bias."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_columns, generator=draw) * torch.logspace(-3, 3, num_rows)[:, None] + 1
    weight, bias = torch.randn(2, num_columns, generator=draw)
    return x.to(DEVICE, dtype), weight.to(DEVICE), bias.to(DEVICE)


@pytest.mark.parametrize("shape", [(1, 1), (3, 129), (70, 128), (17, 1000)])
@pytest.mark.parametrize("is_layer_norm", [True, False])
@pytest.mark.parametrize(("given", "dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_kernel_and_twin_are_as_exact(
    shape: tuple[int, int], is_layer_norm: bool, given: torch.dtype, dtype: torch.dtype
) -> None:
    x, weight, bias = operands(*shape, given)
    arguments = (x, weight, bias if is_layer_norm else None, 1e-5, is_layer_norm, dtype)
    found, expected = normalization.normalize(*arguments), reference.normalize(*arguments)
    assert [part.dtype for part in found] == [part.dtype for part in expected]
    assert [part.shape for part in found] == [part.shape for part in expected]
    assert torch.equal(found[-1], kernels.compute_amax(found[0]))
    # Both against fp64. Where rows lie far from zero for their spread, the center that is subtracted costs both as many digits.
    wide = x.double()
    centered = wide - wide.mean(1, keepdim=True) if is_layer_norm else wide
    rstd = (centered.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    output = centered * rstd * weight + (bias if is_layer_norm else 0.0)
    lost = ULP * (1 + wide.abs().amax(1, keepdim=True) * rstd if is_layer_norm else torch.ones_like(rstd))
    rounding = torch.finfo(dtype).eps / 2 * output.abs()
    for parts in (found, expected):
        assert ((parts[-2].double() - rstd).abs() <= 8 * lost * rstd).all()
        within = 8 * lost * (centered * rstd).abs().clamp_min(1.0) * weight.abs() + 2 * ULP * bias.abs() + rounding
        assert ((parts[0].double() - output).abs() <= within).all()


def test_codes_differ_from_the_twins_by_at_most_one() -> None:
    x, weight, bias = operands(70, 256, torch.float32)
    arguments = (x, weight, bias, 1e-5, True, torch.float32)
    found, expected = normalization.normalize(*arguments), reference.normalize(*arguments)
    ours, theirs = (
        kernels.quantize(parts[0], torch.float8_e4m3fn, amax=expected[-1])[0].view(torch.int8).int()
        for parts in (found, expected)
    )
    assert (ours - theirs).abs().max() <= 1
    assert (ours != theirs).float().mean() < 1e-3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_reaches_the_amax(value: float) -> None:
    x, weight, _ = operands(9, 40, torch.float32)
    x[8, 39] = value
    assert not normalization.normalize(x, weight, None, 1e-5, False, torch.float32)[-1].isfinite()


def test_rows_may_be_apart_and_parameters_of_16_bits() -> None:
    x, weight, bias = operands(9, 80, torch.float32)
    half = (weight[:40].bfloat16(), bias[:40].bfloat16())
    for view in (x[:, :40], x[:, ::2]):
        found = normalization.normalize(view, *half, 1e-5, True, torch.bfloat16)
        expected = reference.normalize(view.contiguous(), *half, 1e-5, True, torch.bfloat16)
        torch.testing.assert_close(found[0], expected[0], rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("num_dims", [1, 3])
def test_leading_dimensions_stay(num_dims: int) -> None:
    x = torch.randn(40) if num_dims == 1 else torch.randn(2, 3, 40).transpose(0, 1)
    found = normalization.normalize(x, None, None, 1e-5, True, torch.float32)
    expected = reference.normalize(x, None, None, 1e-5, True, torch.float32)
    assert [part.shape for part in found] == [part.shape for part in expected]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_no_kernel_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed: \\(\\.\\.\\., N\\) with N up to 16384"):
        kernels.normalize(torch.zeros(2, 16385), None, None, 1e-5, is_layer_norm=True, dtype=torch.float32)
    with pytest.raises(ValueError, match="an RMSNorm has no bias"):
        kernels.normalize(torch.zeros(2, 4), None, torch.zeros(4), 1e-5, is_layer_norm=False, dtype=torch.float32)
