"""Kernels on FP8 gradients against their plain-torch twins: accumulation with stochastic rounding, mean of shards."""

import math

import pytest
import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.kernels import gradient_reference as reference
from octet.worker.kernels.cuda import gradients, language
from tests.numerics.measure import mixed_magnitudes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
DEVICE = "cpu" if language.INTERPRETED.value else "cuda"
E4M3 = torch.float8_e4m3fn
SIZES = (1, 127, 129, 4096, 10_000)


def values_of(size: int, seed: int = 0) -> Tensor:
    return mixed_magnitudes(-(-size // 128), 128, seed).view(-1)[:size].to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alpha", [1.0, -0.25])
@pytest.mark.parametrize("size", SIZES)
def test_accumulate(size: int, alpha: float, dtype: torch.dtype) -> None:
    start = kernels.quantize(values_of(size), E4M3)
    other, words = values_of(size, seed=1).to(dtype), (2**35 + 1, 4, 2**31 + 9)
    actual, expected = [tensor.clone() for tensor in start], [tensor.clone().cpu() for tensor in start]
    gradients.accumulate_(*actual, other, alpha, words)
    reference.accumulate_(*expected, other.cpu(), alpha, words)
    assert torch.equal(actual[1].cpu(), expected[1])
    assert torch.equal(actual[0].cpu().view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("stride", [1, 3])
def test_accumulate_counts_its_draws(stride: int) -> None:
    """A count on the device moves on by itself: the host passes the same numbers each time, as a CUDA graph does."""
    start, other = kernels.quantize(values_of(5000), E4M3), values_of(5000, seed=1)
    actual, expected = [tensor.clone() for tensor in start], [tensor.clone() for tensor in start]
    count = torch.tensor(6, device=start[0].device)
    for drawn in (7, 8):
        gradients.accumulate_(*actual, other, 1.0, (5, 2, 9), count, stride)
        gradients.accumulate_(*expected, other, 1.0, (5, 2 + stride * drawn, 9))
        assert torch.equal(actual[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert count == 8


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_makes_the_scale_nan(bad: float) -> None:
    codes, dequant_scale = kernels.quantize(values_of(5000), E4M3)
    other = values_of(5000, seed=1)
    other[4500] = bad
    gradients.accumulate_(codes, dequant_scale, other, 1.0, (0, 1, 2))
    assert dequant_scale.isnan()


@pytest.mark.parametrize(("low", "high"), [(-0.3, 0.3), (-math.inf, 0.2), (0.0, math.inf), (-1e6, 1e6), (0.0, 0.0)])
@pytest.mark.parametrize("size", SIZES)
def test_clamp(size: int, low: float, high: float) -> None:
    start = kernels.quantize(values_of(size), E4M3)
    words, limit = (2**35 + 1, 4, 2**31 + 9), max(abs(bound) for bound in (low, high) if abs(bound) < math.inf)
    (actual, count), (expected, expected_count) = [([part.clone() for part in start], torch.tensor(6)) for _ in range(2)]
    count = count.to(DEVICE)
    gradients.clamp_(*actual, (low, high, limit), words, count, 3)
    reference.clamp_(*[part.cpu() for part in expected], (low, high, limit), words, expected_count, 3)
    if DEVICE == "cpu":
        assert torch.equal(actual[1], expected[1])
        assert torch.equal(actual[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert count == expected_count == 7
    values, before = kernels.dequantize(*actual).cpu(), kernels.dequantize(*start).cpu()
    beyond = (before < low) | (before > high)
    tolerance = limit * 2**-23
    torch.testing.assert_close(values[beyond], before[beyond].clamp(low, high), rtol=0, atol=tolerance)
    if not beyond.any():
        assert torch.equal(values, before)


def test_clamping_leaves_what_is_not_finite() -> None:
    codes, _ = kernels.quantize(values_of(300), E4M3)
    held, dequant_scale = codes.clone(), torch.tensor(torch.nan, device=DEVICE)
    gradients.clamp_(held, dequant_scale, (-0.1, 0.1, 0.1), (0, 1, 2))
    assert dequant_scale.isnan()
    assert torch.equal(held.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("size", SIZES)
def test_mean_of_shards(size: int, num_ranks: int) -> None:
    shards = [kernels.quantize(values_of(size, seed), E4M3) for seed in range(num_ranks)]
    codes_RS = torch.stack([codes.view(torch.uint8) for codes, _ in shards]).view(E4M3)
    scales_R = torch.stack([dequant_scale for _, dequant_scale in shards])
    mean_S, amax = gradients.mean_of_shards(codes_RS, scales_R)
    expected_S, expected_amax = reference.mean_of_shards(codes_RS.cpu(), scales_R.cpu())
    assert torch.equal(mean_S.cpu(), expected_S)
    assert torch.equal(amax.cpu(), expected_amax)


def test_mean_with_a_rank_that_is_not_finite() -> None:
    codes_RS = torch.zeros(2, 200, dtype=torch.uint8, device=DEVICE).view(E4M3)
    _, amax = gradients.mean_of_shards(codes_RS, torch.tensor([1.0, torch.nan], device=DEVICE))
    assert amax.isnan()
