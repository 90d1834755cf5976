"""The scaled GEMM: quality per tile on mixed magnitudes, any shape, and CUDA's rules."""

import pytest
import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.kernels import ScaledCodes, ScaleKind
from tests.numerics.measure import assert_sqnr, mixed_magnitudes, sqnr_db

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROW, BLOCK_1, BLOCK_128, MX, *_ = ScaleKind
LARGEST = torch.finfo(torch.float32).max
MIN_DB = [(E4M3, 28.0), (E5M2, 24.0)]  # of a product with an E4M3 operand; NUMERICS.md, section 7


def gaussian(num_rows: int, num_columns: int, seed: int) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))


def rows_of_own_magnitude(num_rows: int, num_columns: int, seed: int) -> Tensor:
    """Gaussian rows whose magnitude goes from 1e-3 to 1e3, another for each 128 rows."""
    magnitude = torch.logspace(-3, 3, -(-num_rows // 128)).repeat_interleave(128)[:num_rows]
    return gaussian(num_rows, num_columns, seed) * magnitude.unsqueeze(1)


def quantized(x: Tensor, kind: ScaleKind, dtype: torch.dtype = E4M3) -> ScaledCodes:
    return ScaledCodes(*kernels.quantize(x, dtype, kind.granularity, block=kind.block), kind)


def exact(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double().t()).float()


@pytest.mark.parametrize(("a_dtype", "min_db"), MIN_DB)
class TestQualityPerTile:
    def test_tensor_scales_on_one_magnitude(self, a_dtype: torch.dtype, min_db: float) -> None:
        a, b = gaussian(256, 512, seed=0), gaussian(256, 512, seed=1)
        assert_sqnr(kernels.matmul(quantized(a, TENSOR, a_dtype), quantized(b, TENSOR)), exact(a, b), min_db)

    def test_row_scales_on_rows_of_their_own_magnitude(self, a_dtype: torch.dtype, min_db: float) -> None:
        a, b = rows_of_own_magnitude(384, 512, seed=0), rows_of_own_magnitude(256, 512, seed=1)
        assert_sqnr(kernels.matmul(quantized(a, ROW, a_dtype), quantized(b, ROW)), exact(a, b), min_db)

    @pytest.mark.parametrize(("a_kind", "b_kind"), [(BLOCK_1, BLOCK_1), (BLOCK_1, BLOCK_128), (BLOCK_128, BLOCK_1), (MX, MX)])
    def test_block_scales_on_tiles_of_their_own_magnitude(
        self, a_dtype: torch.dtype, min_db: float, a_kind: ScaleKind, b_kind: ScaleKind
    ) -> None:
        a, b = mixed_magnitudes(384, 512, seed=0), mixed_magnitudes(256, 512, seed=1)
        assert_sqnr(kernels.matmul(quantized(a, a_kind, a_dtype), quantized(b, b_kind)), exact(a, b), min_db)


def test_the_measure_sees_a_tile_that_the_whole_tensor_hides() -> None:
    a, b = rows_of_own_magnitude(384, 512, seed=0), gaussian(256, 512, seed=1)
    out = kernels.matmul(quantized(a, TENSOR), quantized(b, TENSOR))
    assert sqnr_db(out, exact(a, b)) > 28.0
    with pytest.raises(AssertionError, match=r"tile at \(0, \d+\) has .* needs 28.00 dB.*got .*, expected "):
        assert_sqnr(out, exact(a, b), 28.0)


class TestValue:
    """Against codes × dequant_scale multiplied in double precision: what is left is fp32 accumulation."""

    @pytest.mark.parametrize(
        "shape", [(1, 1, 1), (127, 129, 128), (17, 40, 33), (128, 128, 129), (0, 5, 3), (3, 5, 0), (3, 0, 7)]
    )
    @pytest.mark.parametrize(
        ("a_kind", "b_kind"), [(TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR), (BLOCK_1, BLOCK_1), (BLOCK_1, BLOCK_128), (MX, MX)]
    )
    def test_any_shape(self, shape: tuple[int, int, int], a_kind: ScaleKind, b_kind: ScaleKind) -> None:
        num_rows, num_summed, num_out = shape
        a = quantized(gaussian(num_rows, num_summed, seed=0), a_kind)
        b = quantized(gaussian(num_out, num_summed, seed=1), b_kind)
        out = kernels.matmul(a, b)
        assert out.is_contiguous()
        torch.testing.assert_close(out, exact(kernels.values_of(a), kernels.values_of(b)), rtol=1e-5, atol=1e-5)

    def test_transposed_operands(self) -> None:
        """The backward GEMMs: codes that are stored the other way round, with a tensor scale."""
        grad, weight = quantized(gaussian(48, 80, 0), TENSOR, E5M2), quantized(gaussian(80, 64, 1), TENSOR)
        grad_input = kernels.matmul(grad, weight.t())
        expected = exact(kernels.values_of(grad), kernels.values_of(weight).t())
        torch.testing.assert_close(grad_input, expected, rtol=1e-5, atol=1e-5)

    def test_out_dtype(self) -> None:
        a, b = quantized(gaussian(5, 32, 0), TENSOR), quantized(gaussian(7, 32, 1), TENSOR)
        assert torch.equal(kernels.matmul(a, b, torch.bfloat16), kernels.matmul(a, b).bfloat16())

    def test_nan_reaches_its_row(self) -> None:
        a = gaussian(4, 40, 0)
        a[2, 3] = torch.nan
        out = kernels.matmul(quantized(a, TENSOR), quantized(gaussian(5, 40, 1), TENSOR))
        assert out.isnan().any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("kind", [TENSOR, ROW, BLOCK_1, MX])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
class TestExtremes:
    """One behaviour of every kind of scale on inputs (16, 256) at both ends of fp32."""

    weight = gaussian(32, 256, 0)
    weight[::2, :64] = 0.0

    def product(self, a: Tensor, kind: ScaleKind, dtype: torch.dtype) -> Tensor:
        return kernels.matmul(quantized(a, kind, dtype), quantized(self.weight * 2.0**-10, kind))

    def test_the_largest_numbers_saturate(self, dtype: torch.dtype, kind: ScaleKind) -> None:
        """Products that fp32 holds are right, also where the weight is zero or large numbers cancel."""
        a = torch.zeros(16, 256)
        a[:, 3], a[:8, 4], a[:, 200] = LARGEST, -LARGEST, LARGEST
        expected = exact(a.double(), (self.weight * 2.0**-10).double())
        found = self.product(a, kind, dtype)
        assert sqnr_db((found * 2.0**-100), (expected * 2.0**-100)) > 25
        assert bool(found.isfinite().all())

    @pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
    def test_what_is_not_finite_makes_its_row_nan(self, dtype: torch.dtype, kind: ScaleKind, bad: float) -> None:
        a = gaussian(16, 256, 1)
        a[5, 40] = bad
        assert self.product(a, kind, dtype).isnan().all(1).tolist() == [row == 5 for row in range(16)]

    def test_subnormal_inputs_make_no_nan(self, dtype: torch.dtype, kind: ScaleKind) -> None:
        a = torch.full((16, 256), 2.0**-140)
        a[::2] *= -1
        found = self.product(a, kind, dtype)
        assert bool(found.isfinite().all())
        assert bool((found.abs() < 2.0**-130).all())


class TestRules:
    """A CPU refuses what a GPU would refuse."""

    a, b = gaussian(256, 256, seed=0), gaussian(384, 256, seed=1)

    @pytest.mark.parametrize(
        ("a_kind", "b_kind", "a_dtype", "b_dtype", "message"),
        [
            (TENSOR, TENSOR, E5M2, E5M2, "E5M2 with E5M2 does not exist on CUDA"),
            (TENSOR, TENSOR, torch.float16, E4M3, "needs FP8 codes; got torch.float16"),
            (BLOCK_128, BLOCK_128, E4M3, E4M3, "both are 128x128"),
            (BLOCK_1, TENSOR, E4M3, E4M3, "cannot combine block 1x128 with tensor"),
            (ROW, BLOCK_128, E4M3, E4M3, "cannot combine row with block 128x128"),
            (MX, BLOCK_1, E4M3, E4M3, "cannot combine block 1x32 with block 1x128"),
        ],
    )
    def test_combinations(
        self, a_kind: ScaleKind, b_kind: ScaleKind, a_dtype: torch.dtype, b_dtype: torch.dtype, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            kernels.matmul(quantized(self.a, a_kind, a_dtype), quantized(self.b, b_kind, b_dtype))

    def test_shapes(self) -> None:
        a, b = quantized(self.a, ROW), quantized(self.b, ROW)
        with pytest.raises(ValueError, match=r"got \(256, 256\) and \(256, 384\)"):
            kernels.matmul(a, b._replace(codes=b.codes.t()))
        with pytest.raises(ValueError, match=r"b_dequant_scale is \(1, 384\) for codes \(384, 256\); allowed: row \(384, 1\)"):
            kernels.matmul(a, b._replace(dequant_scale=b.dequant_scale.t()))

    def test_fast_accumulation_needs_tensor_scales(self) -> None:
        tensor = (quantized(self.a, TENSOR), quantized(self.b, TENSOR))
        assert torch.equal(kernels.matmul(*tensor, fast_accumulation=True), kernels.matmul(*tensor))
        with pytest.raises(ValueError, match="needs tensor scales; got row and row"):
            kernels.matmul(quantized(self.a, ROW), quantized(self.b, ROW), fast_accumulation=True)
