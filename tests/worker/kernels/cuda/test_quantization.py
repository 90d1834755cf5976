"""The kernels that quantize against the plain-torch reference, bit for bit, on data that can fail and sizes around a tile."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octet.worker.kernels import ScaledCodes, ScaleKind, reference
from octet.worker.kernels.cuda import amax, language, quantization, rescale, tensor_scales
from octet.worker.kernels.scales import empty_operand_scale, scale_shape
from tests.numerics.measure import mixed_magnitudes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter, about NaN and overflow
DEVICE = "cpu" if language.INTERPRETED.value else "cuda"
E4M3, E5M2, FP16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16
DTYPES = (E4M3, E5M2, FP16)
SHAPES = [(1, 1), (1, 129), (127, 128), (128, 127), (129, 257), (256, 1), (260, 204)]
SIDES = ("rows", "columns", "both")
IN_EVERY_RUN = ((1, 129), (127, 128), (129, 257), (256, 1))
"""A row, one element less than a tile and one more, and a column."""


def shapes(*others: tuple[int, ...]) -> list[Any]:
    """Return SHAPES, some of them in the matrix, and others."""
    return [*(shape if shape in IN_EVERY_RUN else pytest.param(shape, marks=pytest.mark.matrix) for shape in SHAPES), *others]


def formats_of_16_bit_input(dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    """Return (input dtype, dtype, kind): E4M3 of each kind from one of the inputs in turn, the others as `formats` does."""
    found = []
    for input_number, input_dtype in enumerate((torch.bfloat16, torch.float16)):
        for dtype, (kind_number, kind) in itertools.product(dtypes, enumerate(ScaleKind)):
            is_default = input_number == kind_number % 2 if dtype == E4M3 else kind is ScaleKind.TENSOR
            found.append(pytest.param(input_dtype, dtype, kind, marks=() if is_default else pytest.mark.matrix))
    return found


def formats(dtypes: tuple[torch.dtype, ...], *, others: bool = True) -> list[Any]:
    """Return (dtype, kind): E4M3 with every kind, if `others` the other dtypes with one scale; the rest is in the matrix."""
    found = []
    for dtype, kind in itertools.product(dtypes, ScaleKind):
        is_default = dtype == E4M3 or (others and kind is ScaleKind.TENSOR)
        found.append(pytest.param(dtype, kind, marks=() if is_default else pytest.mark.matrix))
    return found


def hard_matrix(num_rows: int, num_columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tiles of their own magnitude; of the larger ones some are zero, one has a huge element, three have non-finite ones."""
    x = mixed_magnitudes(num_rows, num_columns).to(dtype)
    if num_rows > 128 and num_columns > 128:
        x[:130, :130] = 0
        x[3, 140] = torch.finfo(dtype).max
        x[128, 5], x[num_rows - 1, 200], x[num_rows - 1, 131] = math.nan, math.inf, -math.inf
    return x.to(DEVICE)


def some_tensor(shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 2:
        return hard_matrix(*shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal bits, shapes and strides (of a dimension of size 1 none counts); a NaN's bits count for FP8 only."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    strides = [
        (one, other) for size, one, other in zip(actual.shape, actual.stride(), expected.stride(), strict=True) if size > 1
    ]
    assert all(one == other for one, other in strides)
    if actual.dtype.itemsize == 1 and actual.dtype != torch.bool:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [*SHAPES, (3, 5, 130), (129,), (), (0, 5), (5, 0)])
@pytest.mark.parametrize("kind", ScaleKind)
def test_compute_amax(kind: ScaleKind, shape: tuple[int, ...]) -> None:
    if not shape and kind is not ScaleKind.TENSOR:
        return
    x = some_tensor(shape)
    assert_same(amax.compute_amax(x, kind), reference.compute_amax(x, kind))


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ScaleKind)
def test_a_non_finite_element_marks_its_group_alone(kind: ScaleKind, bad: float) -> None:
    x = torch.ones(256, 300, device=DEVICE)
    x[130, 270] = bad
    found = amax.compute_amax(x, kind)
    assert torch.equal(found.isfinite(), reference.compute_amax(x, kind).isfinite())
    assert int((~found.isfinite()).sum()) == 1


@pytest.mark.parametrize("size", [1, 8191, 8192, 8193, 100_000])
def test_tensor_amax_of_many_programs(size: int) -> None:
    x = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
    x[size * 2 // 3] = -3.0
    assert amax.tensor_amax(x).item() == 3.0
    assert amax.tensor_amax(x, unless=torch.tensor(False, device=DEVICE)).item() == 3.0
    assert amax.tensor_amax(x, unless=torch.tensor(True, device=DEVICE)).item() == 0.0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_all_finite_sees_one_bad_element(dtype: torch.dtype, bad: float) -> None:
    if dtype == E4M3:
        bad = math.copysign(math.nan, bad)  # the format has no infinity
    x = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0] * 3000).to(dtype).to(DEVICE)
    assert bool(amax.all_finite(x))
    x[8500] = bad
    assert not bool(amax.all_finite(x))


@pytest.mark.parametrize(("dtype", "kind"), formats(DTYPES))
class TestQuantize:
    @pytest.mark.parametrize("shape", shapes((3, 5, 130), (129,), (0, 5), (2, 0, 128)))
    def test_shapes(self, kind: ScaleKind, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        x = (
            hard_matrix(*shape)
            if len(shape) == 2
            else torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        )
        actual = quantization.quantize(x, dtype, kind, 1, None)
        for one, other in zip(actual, reference.quantize(x, dtype, kind, 1, None), strict=True):
            assert_same(one, other)

    @pytest.mark.parametrize("shape", [(140, 204), (1, 129), (3, 5, 130)])
    def test_given_amax_and_back(self, kind: ScaleKind, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 1e3
        given = amax.compute_amax(x, kind) / 8  # so that much saturates
        codes, dequant_scale = quantization.quantize(x, dtype, kind, 0, given)
        for one, other in zip((codes, dequant_scale), reference.quantize(x, dtype, kind, 0, given), strict=True):
            assert_same(one, other)
        for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
            quantized = ScaledCodes(codes, dequant_scale, kind)
            assert_same(rescale.dequantize(quantized, out_dtype), reference.dequantize(quantized, out_dtype))

    def test_a_stale_scale_saturates_and_any_scale_divides(self, kind: ScaleKind, dtype: torch.dtype) -> None:
        x = hard_matrix(130, 204)
        shape = scale_shape(x.shape, kind)
        for scale in (2.0**-100, 0.3, 2.0**100):
            dequant_scale = torch.full(shape, scale, device=DEVICE)
            assert_same(rescale.encode(x, dequant_scale, kind, dtype), reference.encode(x, dequant_scale, kind, dtype))


LARGEST = torch.finfo(torch.float32).max
EXTREMES = {
    "largest": (LARGEST, -LARGEST),
    "infinite": (math.inf, -math.inf, LARGEST),
    "subnormal": (2.0**-149, -(2.0**-140), 2.0**-127),
}


@pytest.mark.parametrize("extremes", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("kind", list(ScaleKind))
def test_extreme_inputs(kind: ScaleKind, dtype: torch.dtype, extremes: tuple[float, ...]) -> None:
    """Both sides of an operand, and the values of codes, on what lies at both ends of fp32."""
    x = torch.zeros(34, 140)
    for number, extreme in enumerate(extremes):
        x[number::5, number::7] = extreme
    x = x.to(DEVICE)
    parts = quantization.quantize_operand(x, dtype, kind, 0, "both")
    for one, other in zip(parts, reference.quantize_operand(x, dtype, kind, 0, "both"), strict=True):
        assert_same(one, other)
    codes, dequant_scale = quantization.quantize(x, dtype, kind, 0, None)
    quantized = ScaledCodes(codes, dequant_scale, kind)
    values = rescale.dequantize(quantized, torch.float32)
    assert_same(values, reference.dequantize(quantized, torch.float32))
    assert torch.equal(values.isnan(), ~x.isfinite())


@pytest.mark.parametrize(("dtype", "kind"), formats((E4M3, E5M2)))
class TestOperand:
    @pytest.mark.parametrize("shape", shapes((0, 5), (5, 0)))
    def test_both_sides_from_one_read(self, kind: ScaleKind, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        x = hard_matrix(*shape)
        actual = quantization.quantize_operand(x, dtype, kind, 0, "both")
        expected = reference.quantize_operand(x, dtype, kind, 0, "both")
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)

    @pytest.mark.parametrize("sides", ["rows", "columns"])
    def test_one_side(self, kind: ScaleKind, dtype: torch.dtype, sides: str) -> None:
        x = hard_matrix(129, 257)
        actual = quantization.quantize_operand(x, dtype, kind, 0, sides)
        expected = reference.quantize_operand(x, dtype, kind, 0, sides)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)

    def test_transposed_codes_are_those_of_the_transposed_matrix(self, kind: ScaleKind, dtype: torch.dtype) -> None:
        x = hard_matrix(129, 256)
        *_, codes_t, scale_t = quantization.quantize_operand(x, dtype, kind, 0, "both")
        codes, scale = quantization.quantize(x.t().contiguous(), dtype, kind, 0, None)
        assert torch.equal(codes_t.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(scale_t, scale)
        assert scale_t.stride() == empty_operand_scale(codes.shape, kind, x.device).stride()


@pytest.mark.system
@pytest.mark.parametrize(("dtype", "kind"), formats(DTYPES, others=False))
def test_strides_do_not_matter(kind: ScaleKind, dtype: torch.dtype) -> None:
    x = hard_matrix(130, 204)
    for view in (x.t(), x[:, ::2], x[17:120, 3:100], x[:1].expand(9, 204), x.view(130, 2, 102).transpose(0, 1)):
        codes, dequant_scale = quantization.quantize(view, dtype, kind, 0, None)
        expected_codes, expected_scale = reference.quantize(view.contiguous(), dtype, kind, 0, None)
        assert_same(codes, expected_codes)
        assert_same(dequant_scale, expected_scale)


@pytest.mark.parametrize(("input_dtype", "dtype", "kind"), formats_of_16_bit_input(DTYPES))
def test_16_bit_input(kind: ScaleKind, dtype: torch.dtype, input_dtype: torch.dtype) -> None:
    x = hard_matrix(130, 204, input_dtype)
    actual = quantization.quantize(x, dtype, kind, 0, None)
    for one, other in zip(actual, reference.quantize(x, dtype, kind, 0, None), strict=True):
        assert_same(one, other)


@pytest.mark.system
@pytest.mark.parametrize(("input_dtype", "dtype", "kind"), formats_of_16_bit_input((E4M3, E5M2)))
def test_strided_16_bit_input(kind: ScaleKind, dtype: torch.dtype, input_dtype: torch.dtype) -> None:
    x = hard_matrix(130, 204, input_dtype)
    for view in (x[17:120, 3:100], x.t(), x[:1].expand(9, 204)):
        actual = quantization.quantize_operand(view, dtype, kind, 0, "both")
        expected = reference.quantize_operand(view.contiguous(), dtype, kind, 0, "both")
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize(
    "x", [hard_matrix(260, 204), hard_matrix(100, 204), hard_matrix(204, 100).t()], ids=["bad", "good", "t"]
)
def test_a_window_is_used_once_it_is_full(x: Tensor, sides: str, is_full: bool) -> None:
    window = torch.tensor(3.0, device=DEVICE), torch.tensor(is_full, device=DEVICE)
    actual = quantization.quantize_operand(x, E4M3, ScaleKind.TENSOR, 0, sides, *window)
    expected = reference.quantize_operand(x, E4M3, ScaleKind.TENSOR, 0, sides, *window)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("sides", SIDES)
def test_a_known_amax_is_scaled_by_and_the_rest_saturates(sides: str) -> None:
    x, known = mixed_magnitudes(130, 200).to(DEVICE), torch.tensor(0.3, device=DEVICE)
    actual = quantization.quantize_operand(x, E4M3, ScaleKind.TENSOR, 0, sides, known)
    expected = reference.quantize_operand(x, E4M3, ScaleKind.TENSOR, 0, sides, known)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)
    assert float(actual[1]) == 2.0**-10  # 0.3 times 1024 is at most 448
    assert float(actual[0].float().abs().max()) == 448


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(3, 8))])
def test_fuzz_the_transposed_codes_over_tiles(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any NaN in a tile leaves its neighbours alone, whatever the tile and the number of warps."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_columns = torch.randint(1, 300, (2,), generator=generator).tolist()
    x = torch.randn(num_rows, num_columns, generator=generator) * 10 ** (torch.rand(num_rows, 1, generator=generator) * 6 - 3)
    bad = torch.rand(x.shape, generator=generator) < 0.01
    x = torch.where(bad, torch.tensor([math.nan, math.inf, -math.inf])[torch.randint(0, 3, x.shape, generator=generator)], x)
    x = x.to(DEVICE, [torch.float32, torch.bfloat16][seed % 2])
    monkeypatch.setattr(quantization, "TILE_WARPS", [4, 8, 16][seed % 3])
    monkeypatch.setattr(quantization, "SHARED_SCALE_TILE", [(32, 128), (64, 64), (128, 128), (128, 32)][seed % 4])
    for kind in ScaleKind:
        actual = quantization.quantize_operand(x, E4M3, kind, 0, "both")
        for one, other in zip(actual, reference.quantize_operand(x, E4M3, kind, 0, "both"), strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(129, 257), (1, 1), (8192,), (0, 5)])
def test_codes_with_a_residual_and_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(E4M3).to(DEVICE)
    residual = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8).to(DEVICE)
    for scale in (2.0**-20, 1.0):
        arguments = (codes, residual, torch.tensor(scale, device=DEVICE), dtype)
        assert_same(rescale.split_dequantize(*arguments), reference.split_dequantize(*arguments))


class TestActivations:
    """One pass reads, activates, rounds and quantizes. The twin does the same in two."""

    @pytest.mark.parametrize("sides", [*(pytest.param(sides, marks=pytest.mark.matrix) for sides in SIDES[:2]), "both"])
    @pytest.mark.parametrize("kind", ScaleKind)
    def test_relu_has_the_twins_bits(self, kind: ScaleKind, sides: str) -> None:
        x = hard_matrix(130, 260, torch.bfloat16)
        actual = tensor_scales.activate_operand(x, "relu", E4M3, kind, 0, sides)
        for one, other in zip(actual, reference.activate_operand(x, "relu", E4M3, kind, 0, sides), strict=True):
            assert_same(one, other)

    @pytest.mark.usefixtures("without_onednn")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.matrix)])
    @pytest.mark.parametrize("activation", ["gelu", "gelu-tanh", "silu"])
    def test_the_others_are_one_code_off_in_one_of_a_thousand_at_most(self, activation: str, dtype: torch.dtype) -> None:
        """exp and erf differ in their last bits; what decides is on which side of a middle between codes that falls."""
        x = (3 * torch.randn(130, 260, generator=torch.Generator().manual_seed(2))).to(dtype).to(DEVICE)
        x[5, 7] = math.nan
        for window in ((), (torch.tensor(5.0, device=DEVICE), torch.tensor(True, device=DEVICE))):
            found = tensor_scales.activate_operand(x, activation, E4M3, ScaleKind.TENSOR, 0, "both", *window)
            twins = reference.activate_operand(x, activation, E4M3, ScaleKind.TENSOR, 0, "both", *window)
            torch.testing.assert_close(found[4], twins[4], equal_nan=True)
            assert_same(found[1], twins[1])
            assert torch.equal(found[2].view(torch.uint8), found[0].t().contiguous().view(torch.uint8))
            values, expected = found[0].float(), twins[0].float()
            torch.testing.assert_close(values, expected, rtol=2.0**-3, atol=2.0**-9, equal_nan=True)  # neighbours
            assert int((values.nan_to_num() != expected.nan_to_num()).sum()) <= x.numel() // 1000

    def test_the_amax_that_scales_is_returned_and_makes_the_same_codes(self) -> None:
        x = torch.randn(130, 260, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        *rows, amax_found = tensor_scales.activate_operand(x, "gelu", E4M3, ScaleKind.TENSOR, 0, "rows")
        again = tensor_scales.activate_operand(x, "gelu", E4M3, ScaleKind.TENSOR, 0, "columns", amax_found)
        for one, other in zip(again, rows, strict=True):
            assert_same(one, other.t().contiguous())
