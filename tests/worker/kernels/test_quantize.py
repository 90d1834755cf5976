"""Scales and codes against the NumPy oracle, bit for bit, on inputs that can fail."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from octet.worker import kernels
from tests.numerics.measure import mixed_magnitudes
from tests.numerics.oracle import formats as oracle

E4M3, E5M2, FP16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16
DTYPES = (E4M3, E5M2, FP16)
GRANULARITIES = (("tensor", (1, 128)), ("row", (1, 128)), ("block", (1, 128)), ("block", (128, 128)), ("mx", (1, 32)))

LARGEST = torch.finfo(torch.float32).max
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16, FP16: 2.0**-24}
"""Each format's smallest positive code."""

GOLDEN_QUANT_SCALES = {  # NUMERICS.md, section 3
    E4M3: {
        0.001: 2.0**18, 0.5: 512, 1: 256, 3.5: 128, 10: 32, 100: 4, 224: 2, 448: 1, 449: 0.5, 10000: 1 / 32,
    },
    E5M2: {1: 32768, 10: 4096, 448: 128, 57344: 1, 1e6: 1 / 32},
    FP16: {1: 32768, 448: 128, 10000: 4, 57344: 1, 1e6: 1 / 16},
}  # fmt: skip


def integers(codes: Tensor) -> np.ndarray:
    return codes.contiguous().view(torch.int16 if codes.dtype == FP16 else torch.uint8).numpy()


def assert_equals_oracle(x: Tensor, dtype: torch.dtype, granularity: str, block: tuple[int, int]) -> None:
    codes, dequant_scale = kernels.quantize(x, dtype, granularity, block=block)
    assert codes.dtype == dtype
    assert codes.shape == x.shape
    matrix = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    expected_codes, expected_scales = oracle.quantize(matrix.numpy(), str(dtype)[6:], granularity, block)
    np.testing.assert_array_equal(dequant_scale.reshape(-1).numpy(), expected_scales)
    actual = integers(codes).reshape(matrix.shape).view(expected_codes.dtype)
    np.testing.assert_array_equal(actual, expected_codes)


@pytest.mark.parametrize("dtype", DTYPES)
class TestScale:
    def test_golden_table(self, dtype: torch.dtype) -> None:
        amax = torch.tensor(list(GOLDEN_QUANT_SCALES[dtype]))
        expected = torch.tensor(list(GOLDEN_QUANT_SCALES[dtype].values()))
        assert torch.equal(1 / kernels.dequant_scale_from_amax(amax, dtype), expected)

    def test_zero_and_nonfinite_amax_keep_the_previous_scale(self, dtype: torch.dtype) -> None:
        amax = torch.tensor([0.0, math.nan, math.inf])
        assert kernels.dequant_scale_from_amax(amax, dtype).tolist() == [1, 1, 1]
        previous = torch.tensor([0.125, 8.0, 2.0])
        assert torch.equal(kernels.dequant_scale_from_amax(amax, dtype, previous=previous), previous)

    def test_exponents_are_clamped_to_fp32s_normal_range(self, dtype: torch.dtype) -> None:
        amax = torch.tensor([1e-38, 1.2e-36, 1e-45, 3.4e38])
        for margin in (-40, 0, 40):
            dequant_scale = kernels.dequant_scale_from_amax(amax, dtype, margin)
            smallest_normal = torch.finfo(torch.float32).smallest_normal
            assert bool((dequant_scale >= smallest_normal).all() and (1 / dequant_scale >= smallest_normal).all())

    @pytest.mark.parametrize("margin", [0, 3])
    def test_equals_exact_arithmetic_next_to_every_power_of_two(self, dtype: torch.dtype, margin: int) -> None:
        limit = oracle.MAX[str(dtype)[6:]]
        around = np.float32([2.0**e * m for e in range(-148, 127) for m in (1.0, limit / 2 ** math.floor(math.log2(limit)))])
        amax = np.concatenate([around, np.nextafter(around, np.float32(0)), np.nextafter(around, np.float32(np.inf))])
        amax = amax[(amax > 0) & np.isfinite(amax)]
        expected = np.array([oracle.dequant_scale(float(a), str(dtype)[6:], margin) for a in amax])
        actual = kernels.dequant_scale_from_amax(torch.from_numpy(amax), dtype, margin)
        np.testing.assert_array_equal(actual.numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("granularity", "block"), GRANULARITIES)
class TestQuantizeAgainstOracle:
    @pytest.mark.parametrize("shape", [(300, 260), (128, 129), (127, 128), (129, 127), (1, 1), (1, 129), (256, 1)])
    def test_mixed_magnitudes(
        self, dtype: torch.dtype, granularity: str, block: tuple[int, int], shape: tuple[int, int]
    ) -> None:
        assert_equals_oracle(mixed_magnitudes(*shape), dtype, granularity, block)

    def test_zeros_huge_element_and_nonfinite(self, dtype: torch.dtype, granularity: str, block: tuple[int, int]) -> None:
        x = mixed_magnitudes(260, 260)
        x[:130, :130] = 0
        x[3, 140] = 3e38
        x[140, 5], x[200, 200], x[201, 131] = math.nan, math.inf, -math.inf
        assert_equals_oracle(x, dtype, granularity, block)

    def test_the_largest_numbers_have_codes_that_are_no_nan(
        self, dtype: torch.dtype, granularity: str, block: tuple[int, int]
    ) -> None:
        x = mixed_magnitudes(140, 260)
        x[:, ::37], x[5, 200] = LARGEST, -LARGEST
        assert_equals_oracle(x, dtype, granularity, block)
        codes, dequant_scale = kernels.quantize(x, dtype, granularity, block=block)
        assert float(codes[3, 37].float()) * float(dequant_scale.max()) == 2.0**128
        assert bool(codes.float().isfinite().all())

    def test_an_infinite_element_is_nan_and_others_of_its_group_saturate(
        self, dtype: torch.dtype, granularity: str, block: tuple[int, int]
    ) -> None:
        """The scale of a group with Inf is 1: its own codes say so, and no other element becomes NaN."""
        x = torch.full((2, 256), 1.0)
        x[0, 3], x[0, 4], x[0, 5], x[0, 200] = math.inf, -math.inf, LARGEST, -LARGEST
        assert_equals_oracle(x, dtype, granularity, block)
        codes, dequant_scale = kernels.quantize(x, dtype, granularity, block=block)
        assert dequant_scale.flatten()[0] == 1
        values = kernels.dequantize(codes, dequant_scale)
        assert values.isnan().nonzero().tolist() == [[0, 3], [0, 4]]
        assert values[0, 5] == torch.finfo(dtype).max

    @pytest.mark.parametrize("magnitude", [2.0**-149, 2.0**-140, 2.0**-127])
    def test_subnormal_inputs(self, dtype: torch.dtype, granularity: str, block: tuple[int, int], magnitude: float) -> None:
        """Their scale is 2^-126, so those below a format's smallest code at it become zero, of the right sign."""
        x = torch.full((130, 260), magnitude)
        x[:, ::2] *= -1
        assert_equals_oracle(x, dtype, granularity, block)
        values = kernels.dequantize(*kernels.quantize(x, dtype, granularity, block=block))
        assert bool(((values - x).abs() <= 2.0**-126 * SMALLEST[dtype] / 2).all())

    def test_values_between_codes(self, dtype: torch.dtype, granularity: str, block: tuple[int, int]) -> None:
        """Ties and their neighbours, subnormal codes, and everything around the largest code."""
        significands = torch.arange(0, 2, 2**-6)
        ties = (significands * 2.0 ** torch.arange(-20, 9).unsqueeze(1)).flatten()
        x = torch.stack([ties, torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(9e9)), -ties])
        assert_equals_oracle(x, dtype, granularity, block)

    @pytest.mark.parametrize("shape", [(128,), (127,), (3, 5, 130), (0,), (0, 5), (5, 0), (2, 0, 128)])
    def test_other_shapes(self, dtype: torch.dtype, granularity: str, block: tuple[int, int], shape: tuple[int, ...]) -> None:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        if x.numel():
            assert_equals_oracle(x, dtype, granularity, block)
        codes, dequant_scale = kernels.quantize(x, dtype, granularity, block=block)
        assert kernels.dequantize(codes, dequant_scale).shape == x.shape

    def test_strides_do_not_matter(self, dtype: torch.dtype, granularity: str, block: tuple[int, int]) -> None:
        x = mixed_magnitudes(300, 520)
        for view in (x.t(), x[:, ::2], x[17:150, 3:200], x[:1].expand(140, 520), x.view(300, 2, 260).transpose(0, 1)):
            codes, dequant_scale = kernels.quantize(view, dtype, granularity, block=block)
            same_codes, same_scale = kernels.quantize(view.contiguous(), dtype, granularity, block=block)
            assert torch.equal(dequant_scale, same_scale)
            np.testing.assert_array_equal(integers(codes), integers(same_codes))
            assert torch.equal(kernels.dequantize(codes, dequant_scale), kernels.dequantize(same_codes, same_scale))

    def test_dequantize_is_codes_times_scale(self, dtype: torch.dtype, granularity: str, block: tuple[int, int]) -> None:
        x = mixed_magnitudes(260, 300)
        codes, dequant_scale = kernels.quantize(x, dtype, granularity, block=block)
        values = codes.float().numpy()
        for scale, group in zip(dequant_scale.flatten().tolist(), oracle.groups((260, 300), granularity, block), strict=True):
            values[group] *= scale
        np.testing.assert_array_equal(kernels.dequantize(codes, dequant_scale).numpy(), values)
        assert kernels.dequantize(codes, dequant_scale, torch.bfloat16).dtype == torch.bfloat16


class TestCodes:
    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    def test_every_code_decodes_exactly(self, dtype: torch.dtype) -> None:
        codes = torch.arange(256, dtype=torch.uint8)
        expected = codes.numpy().view(oracle.CAST[str(dtype)[6:]]).astype(np.float32)
        np.testing.assert_array_equal(kernels.dequantize(codes.view(dtype), torch.tensor(1.0)).numpy(), expected)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_finite_values_saturate_at_a_stale_scale(self, dtype: torch.dtype) -> None:
        x = torch.tensor([3e38, -3e38, 1e-30, math.inf, math.nan])
        values = kernels.encode(x, torch.tensor(2.0**-100), dtype).float()
        limit = torch.finfo(dtype).max
        assert values[:2].tolist() == [limit, -limit]
        assert bool(values[2].isfinite())
        assert bool(values[3:].isnan().all())

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_all_finite_sees_one_bad_element(self, dtype: torch.dtype, bad: float) -> None:
        if dtype == E4M3:
            bad = math.copysign(math.nan, bad)  # the format has no infinity
        x = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0] * 100).to(dtype)
        assert bool(kernels.all_finite(x))
        x[151] = bad
        assert not bool(kernels.all_finite(x))

    def test_a_given_amax_is_used(self) -> None:
        x = torch.tensor([1.0, 2.0])
        codes, dequant_scale = kernels.quantize(x, E4M3, amax=torch.tensor(448.0))
        assert dequant_scale == 1
        assert codes.float().tolist() == [1.0, 2.0]

    def test_input_is_left_alone_and_needs_no_gradient(self) -> None:
        x = torch.randn(4, 128, requires_grad=True)
        before = x.detach().clone()
        codes, dequant_scale = kernels.quantize(x, E4M3, "block")
        assert not codes.requires_grad
        assert not dequant_scale.requires_grad
        assert torch.equal(x, before)


class TestRefusals:
    def test_names_what_is_allowed(self) -> None:
        x = torch.ones(2, 2)
        with pytest.raises(ValueError, match=r"float32; allowed: torch\.float8_e4m3fn"):
            kernels.quantize(x, torch.float32)
        with pytest.raises(ValueError, match="'rowwise'; allowed: tensor, row, block"):
            kernels.quantize(x, E4M3, "rowwise")
        with pytest.raises(ValueError, match=r"\(1, 64\); allowed: \(1, 128\)"):
            kernels.quantize(x, E4M3, "block", block=(1, 64))
        with pytest.raises(ValueError, match="at least one dimension"):
            kernels.quantize(torch.tensor(1.0), E4M3, "row")


@pytest.mark.parametrize("size", [1, 7, 128, 100_000])
def test_sqrt_is_correctly_rounded(size: int) -> None:
    values = torch.rand(size, generator=torch.Generator().manual_seed(size)) * 10.0 ** torch.linspace(-37, 38, size)
    expected = torch.from_numpy(np.sqrt(values.numpy()))
    assert torch.equal(kernels.sqrt(values), expected)
