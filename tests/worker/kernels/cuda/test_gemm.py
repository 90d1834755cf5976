"""Products: the backend of each, the layouts of its operands and scales, and the Triton kernel's quality per tile."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from octet.api_schemas.levels import LEVELS
from octet.api_schemas.recipe import RecipeSpec
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.recipe import Recipe
from octet.worker.fp8.weights import encode_weight
from octet.worker.kernels import ScaledCodes, ScaleKind, library, reference
from octet.worker.kernels.cuda import gemm, language, mx
from octet.worker.kernels.cuda.gemm import HOPPER, Plan, plan
from octet.worker.kernels.scales import empty_operand_scale
from tests.numerics.measure import assert_sqnr, mixed_magnitudes

DEVICE = "cpu" if language.INTERPRETED.value else "cuda"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TENSOR, ROW, NARROW, SQUARE, MX, *_ = ScaleKind
PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
# fp32; Hopper sums products of FP8 with about 14 bits
SUMMED = 1e-5 if language.INTERPRETED.value else 2**-9
NEW, OLD = (13, 0), (12, 8)  # CUDA: cuBLASLt scales rows and blocks from 12.9 on
ADA, BLACKWELL, GEFORCE_BLACKWELL = (8, 9), (10, 0), (12, 0)


@pytest.mark.parametrize(
    ("kinds", "dtypes", "capability", "cuda_version", "out_dtype", "expected"),
    [
        ((TENSOR, TENSOR), (E4M3, E4M3), HOPPER, NEW, BF16, Plan("scaled_mm", BF16)),
        ((TENSOR, TENSOR), (E5M2, E4M3), HOPPER, OLD, FP32, Plan("scaled_mm", FP32)),
        ((TENSOR, TENSOR), (E4M3, E5M2), ADA, NEW, FP16, Plan("scaled_mm", FP16)),
        ((ROW, ROW), (E4M3, E4M3), HOPPER, NEW, BF16, Plan("scaled_mm", BF16)),
        ((ROW, ROW), (E5M2, E4M3), HOPPER, NEW, FP32, Plan("scaled_mm", FP32)),
        ((ROW, ROW), (E4M3, E4M3), HOPPER, NEW, FP16, Plan("scaled_mm", FP32)),
        ((ROW, ROW), (E4M3, E4M3), HOPPER, OLD, BF16, Plan("scaled_mm", BF16)),
        ((ROW, ROW), (E4M3, E4M3), ADA, NEW, FP32, Plan("triton", FP32)),
        ((ROW, ROW), (E5M2, E4M3), ADA, NEW, BF16, Plan("scaled_mm", BF16)),
        ((ROW, ROW), (E4M3, E5M2), ADA, NEW, BF16, Plan("triton", BF16)),
        ((ROW, ROW), (E4M3, E4M3), BLACKWELL, NEW, BF16, Plan("scaled_mm", BF16)),
        ((MX, MX), (E4M3, E4M3), BLACKWELL, NEW, BF16, Plan("scaled_mm", BF16)),
        ((MX, MX), (E5M2, E4M3), GEFORCE_BLACKWELL, NEW, FP32, Plan("scaled_mm", FP32)),
        ((MX, MX), (E4M3, E4M3), BLACKWELL, (12, 6), FP32, Plan("triton", FP32)),
        ((MX, MX), (E4M3, E4M3), HOPPER, NEW, BF16, Plan("triton", BF16)),
        ((NARROW, NARROW), (E4M3, E4M3), HOPPER, NEW, FP32, Plan("scaled_mm", FP32)),
        ((NARROW, SQUARE), (E4M3, E4M3), HOPPER, NEW, BF16, Plan("scaled_mm", BF16)),
        ((SQUARE, NARROW), (E4M3, E4M3), HOPPER, NEW, BF16, Plan("scaled_mm", BF16)),
        ((NARROW, SQUARE), (E4M3, E4M3), HOPPER, NEW, FP16, Plan("scaled_mm", FP32)),
        ((NARROW, SQUARE), (E5M2, E4M3), HOPPER, NEW, BF16, Plan("triton", BF16)),
        ((NARROW, NARROW), (E4M3, E5M2), HOPPER, NEW, FP32, Plan("triton", FP32)),
        ((NARROW, NARROW), (E4M3, E4M3), HOPPER, OLD, FP32, Plan("triton", FP32)),
        ((NARROW, NARROW), (E4M3, E4M3), ADA, NEW, FP32, Plan("triton", FP32)),
        ((NARROW, SQUARE), (E4M3, E4M3), BLACKWELL, NEW, BF16, Plan("triton", BF16)),
        ((ROW, ROW), (E4M3, E4M3), BLACKWELL, NEW, FP32, Plan("triton", FP32)),
        ((TENSOR, TENSOR), (E5M2, E4M3), GEFORCE_BLACKWELL, NEW, FP32, Plan("scaled_mm", FP32)),
        ((ROW, ROW), (E4M3, E4M3), GEFORCE_BLACKWELL, NEW, BF16, Plan("scaled_mm", BF16)),
        ((ROW, ROW), (E5M2, E4M3), GEFORCE_BLACKWELL, NEW, BF16, Plan("scaled_mm", BF16)),
        ((ROW, ROW), (E4M3, E5M2), GEFORCE_BLACKWELL, NEW, BF16, Plan("triton", BF16)),
        ((ROW, ROW), (E4M3, E4M3), GEFORCE_BLACKWELL, NEW, FP32, Plan("triton", FP32)),
        ((NARROW, NARROW), (E4M3, E4M3), GEFORCE_BLACKWELL, NEW, BF16, Plan("triton", BF16)),
        ((SQUARE, NARROW), (E4M3, E4M3), GEFORCE_BLACKWELL, NEW, BF16, Plan("triton", BF16)),
    ],
)
def test_plan(
    kinds: tuple[ScaleKind, ScaleKind],
    dtypes: tuple[torch.dtype, torch.dtype],
    capability: tuple[int, int],
    cuda_version: tuple[int, int],
    out_dtype: torch.dtype,
    expected: Plan,
) -> None:
    assert plan(kinds, dtypes, capability, cuda_version, out_dtype) == expected


def quantized(x: Tensor, kind: ScaleKind, dtype: torch.dtype = E4M3) -> ScaledCodes:
    return ScaledCodes(*reference.quantize(x.to(DEVICE), dtype, kind, 0, None), kind)


def assert_equal_sums(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Each element is right up to a tolerance relative to the outputs' size, since where summands cancel, their errors stay."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.square().mean().sqrt()))


def product(a: ScaledCodes, b: ScaledCodes, out_dtype: torch.dtype = FP32) -> Tensor:
    """Multiply by the Triton kernel."""
    return gemm.triton_matmul(*gemm.with_matching_scales(a, b), out_dtype, 2)


@pytest.mark.parametrize(("a_dtype", "min_db"), [(E4M3, 28.0), (E5M2, 24.0)])  # NUMERICS.md, section 7
@pytest.mark.parametrize(("a_kind", "b_kind"), [(NARROW, NARROW), (NARROW, SQUARE), (SQUARE, NARROW), (MX, MX)])
def test_quality_per_tile(a_kind: ScaleKind, b_kind: ScaleKind, a_dtype: torch.dtype, min_db: float) -> None:
    a, b = mixed_magnitudes(256, 384, seed=0), mixed_magnitudes(256, 384, seed=1)
    out = product(quantized(a, a_kind, a_dtype), quantized(b, b_kind))
    assert_sqnr(out.cpu(), (a.double() @ b.double().t()).float(), min_db)


@pytest.mark.parametrize(
    ("shape", "dtypes"),
    [
        pytest.param(shape, dtypes, marks=() if shape_number % len(PAIRS) == pair_number else pytest.mark.matrix)
        for shape_number, shape in enumerate([(300, 272, 144), (127, 144, 128), (17, 48, 48), (1, 16, 16)])
        for pair_number, dtypes in enumerate(PAIRS)
    ],
)
@pytest.mark.parametrize(
    ("a_kind", "b_kind"),
    [
        *((TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR), (TENSOR, ROW)),
        *((NARROW, NARROW), (NARROW, SQUARE), (SQUARE, NARROW), (MX, MX)),
    ],
)
def test_any_shape(
    shape: tuple[int, int, int], a_kind: ScaleKind, b_kind: ScaleKind, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    num_rows, num_summed, num_out = shape
    generator = torch.Generator().manual_seed(0)
    a = quantized(torch.randn(num_rows, num_summed, generator=generator), a_kind, dtypes[0])
    b = quantized(torch.randn(num_out, num_summed, generator=generator), b_kind, dtypes[1])
    expected = reference.matmul(a, b, FP32, False)
    for out_dtype, tolerance in ((FP32, SUMMED), (BF16, 2**-7)):
        assert_equal_sums(product(a, b, out_dtype).float(), expected, tolerance)


def test_many_tiles_are_all_written() -> None:
    a = quantized(torch.randn(1100, 16, generator=torch.Generator().manual_seed(0)), TENSOR)
    b = quantized(torch.randn(400, 16, generator=torch.Generator().manual_seed(1)), TENSOR)
    assert_equal_sums(product(a, b), reference.matmul(a, b, FP32, False), SUMMED)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_reaches_its_row() -> None:
    a = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    a[2, 3] = torch.nan
    out = product(quantized(a, TENSOR), quantized(torch.ones(16, 48), TENSOR))
    assert out.isnan().any(1).tolist() == [False, False, True, False]


class TestCublas:
    """torch has products with scales of tensors and rows on CPU; the layouts of the others it checks on fake tensors."""

    @pytest.mark.parametrize("out_dtype", [FP32, BF16, FP16])
    @pytest.mark.parametrize("a_dtype", [E4M3, E5M2])
    @pytest.mark.parametrize(("a_kind", "b_kind"), [(TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR), (TENSOR, ROW)])
    def test_scales_of_tensors_and_rows(
        self,
        a_kind: ScaleKind,
        b_kind: ScaleKind,
        a_dtype: torch.dtype,
        out_dtype: torch.dtype,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        is_there = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", DEVICE.upper())
        if not is_there and (a_kind, b_kind) != (TENSOR, TENSOR):
            pytest.skip("missing: torch's scaled_mm on a CPU, which torch 2.11 lacks")
        monkeypatch.setattr(gemm, "platform", lambda _device: (HOPPER, NEW))
        generator = torch.Generator().manual_seed(0)
        a = quantized(torch.randn(18, 48, generator=generator), a_kind, a_dtype)
        b = quantized(torch.randn(32, 48, generator=generator), b_kind)
        out = gemm.matmul(a, b, out_dtype, False)
        assert out.dtype == out_dtype
        expected = reference.matmul(a, b, FP32, False)
        torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)

    @pytest.mark.parametrize("shape", [(256, 512, 384), (6, 128, 128), (128, 640, 256)])
    @pytest.mark.parametrize(
        ("a_kind", "b_kind"), [(TENSOR, TENSOR), (ROW, ROW), (NARROW, NARROW), (NARROW, SQUARE), (SQUARE, NARROW)]
    )
    def test_layouts_are_those_that_torch_asks_for(
        self, a_kind: ScaleKind, b_kind: ScaleKind, shape: tuple[int, int, int]
    ) -> None:
        num_rows, num_summed, num_out = shape
        if SQUARE in (a_kind, b_kind) and num_rows % 128:
            return
        with FakeTensorMode():
            device = torch.device("cpu")
            a = torch.empty(num_rows, num_summed, dtype=E4M3, device=device)
            b = torch.empty(num_out, num_summed, dtype=E4M3, device=device)
            left = ScaledCodes(a, empty_operand_scale(a.shape, a_kind, device), a_kind)
            right = ScaledCodes(b, empty_operand_scale(b.shape, b_kind, device), b_kind)
            out = gemm.cublas_matmul(left, right, BF16, False)
        assert out.shape == (num_rows, num_out)
        assert out.dtype == BF16


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.skipif(DEVICE == "cuda", reason="overrides the ops of a CPU")
@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("level", ["te", "O2", "O3"])
def test_fast_accumulation_reaches_torch(level: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`use_fast_accum` of torch._scaled_mm: the output's is set, an input gradient's if asked for."""
    asked: list[tuple[tuple[int, ...], bool]] = []

    def scaled_mm(*operands: Tensor, use_fast_accum: bool, **options: Any) -> Tensor:
        out = torch._scaled_mm(*operands, use_fast_accum=use_fast_accum, **options)
        asked.append((tuple(out.shape), use_fast_accum))
        return out

    monkeypatch.setattr(gemm, "scaled_mm", scaled_mm)
    ops = torch.library.Library("octet", "IMPL")
    try:
        library.run_triton_on("CPU", ops)
        linear = nn.Linear(32, 48, bias=False)
        recipe = Recipe.resolve(RecipeSpec(fast_grad_input=is_fast))
        layer = Float8Linear(linear, recipe, encode_weight(linear.weight, LEVELS[level]))
        layer(torch.randn(16, 32, requires_grad=True)).sum().backward()
    finally:
        ops._destroy()
    assert asked == [((16, 48), True), ((16, 32), is_fast), ((48, 32), False)]


class TestLayouts:
    """Scales and codes are laid out as ScaledBlas.cpp asks for them."""

    @pytest.mark.parametrize("num_rows", [1, 4, 300])
    def test_narrow_blocks_have_adjacent_rows(self, num_rows: int) -> None:
        scale = empty_operand_scale(torch.Size((num_rows, 300)), NARROW, torch.device("cpu")).fill_(2.0)
        assert gemm.cublas_scale(scale, NARROW).data_ptr() == scale.data_ptr()  # nothing is copied
        copied = gemm.cublas_scale(scale.contiguous(), NARROW)
        assert copied.stride() == (1, num_rows)
        assert torch.equal(copied, scale)

    @pytest.mark.parametrize("shape", [(1, 1), (128, 4), (300, 9)])
    def test_mx_scales_are_e8m0_in_tiles_of_128_by_4(self, shape: tuple[int, int]) -> None:
        """The offset formula of cuBLAS' documentation, element by element, against bytes made by ml_dtypes."""
        num_rows, num_blocks = shape
        exponents = torch.randint(-126, 127, shape, generator=torch.Generator().manual_seed(0))
        scale = torch.ldexp(torch.ones(shape), exponents)
        laid_out = mx.swizzled(scale)
        assert laid_out.dtype == torch.float8_e8m0fnu
        tiles_in_row = -(-num_blocks // 4)
        assert laid_out.shape == (512 * tiles_in_row * -(-num_rows // 128),)
        expected = np.zeros(laid_out.shape, np.uint8)
        for (row, block), value in np.ndenumerate(scale.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)):
            tile = row // 128 * tiles_in_row + block // 4
            expected[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] = value
        np.testing.assert_array_equal(laid_out.view(torch.uint8).numpy(), expected)

    @pytest.mark.parametrize("shape", [(256, 512, 384), (7, 48, 16)])
    def test_mx_operands_are_those_that_torch_asks_for(self, shape: tuple[int, int, int]) -> None:
        num_rows, num_summed, num_out = shape
        with FakeTensorMode():
            a, b = (
                ScaledCodes(torch.empty(size, num_summed, dtype=E4M3), torch.ones(size, -(-num_summed // 32)), MX)
                for size in (num_rows, num_out)
            )
            out = gemm.cublas_matmul(a, b, BF16, False)
        assert (out.shape, out.dtype) == ((num_rows, num_out), BF16)

    @pytest.mark.parametrize(("num_blocks", "padded"), [(1, 4), (4, 4), (5, 8)])
    def test_square_blocks_have_adjacent_k_padded_to_four(self, num_blocks: int, padded: int) -> None:
        scale = torch.arange(3.0 * num_blocks).view(3, num_blocks)
        laid_out = gemm.cublas_scale(scale, SQUARE)
        assert laid_out.shape == (padded, 3)
        assert laid_out.stride() == (1, padded)
        assert torch.equal(laid_out[:num_blocks], scale.t())

    def test_one_block_of_k_is_a_scale_for_each_row(self) -> None:
        a, b = quantized(torch.randn(5, 96), ROW), quantized(torch.randn(256, 96), SQUARE)
        left, right = gemm.with_matching_scales(a, b)
        assert (left.kind, right.kind) == (ROW, ROW)
        assert left.dequant_scale.shape == (5, 1)
        assert torch.equal(right.dequant_scale.view(2, 128), b.dequant_scale.expand(2, 128))

    def test_a_transposed_view_is_transposed(self) -> None:
        codes = torch.randint(0, 256, (48, 80), dtype=torch.uint8).view(E4M3)
        assert gemm.with_adjacent_columns(codes) is codes
        for view in (codes.t(), codes[:, ::2], codes[:, 16:]):
            adjacent = gemm.with_adjacent_columns(view)
            assert adjacent.is_contiguous()
            assert torch.equal(adjacent.view(torch.uint8), view.view(torch.uint8))
