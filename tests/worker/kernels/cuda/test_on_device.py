"""The kernels on a GPU: its own casts, and cuBLASLt's products. Only a GPU can show this. `pytest -m gpu`.

The other tests of this folder run on the GPU, too, if there is one.
"""

import math

import pytest
import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.kernels import ScaledCodes, ScaleKind
from octet.worker.kernels.cuda import gemm
from tests.numerics.measure import assert_sqnr, mixed_magnitudes

pytestmark = pytest.mark.gpu
E4M3, E5M2, FP16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16
FP32, BF16 = torch.float32, torch.bfloat16
TENSOR, ROW, NARROW, SQUARE, MX, *_ = ScaleKind
KIND_PAIRS = [(TENSOR, TENSOR), (ROW, ROW), (ROW, TENSOR), (NARROW, NARROW), (NARROW, SQUARE), (SQUARE, NARROW), (MX, MX)]


def quantized(x: Tensor, kind: ScaleKind, dtype: torch.dtype = E4M3) -> ScaledCodes:
    return ScaledCodes(*kernels.quantize(x, dtype, kind.granularity, block=kind.block), kind)


def on_gpu(operand: ScaledCodes) -> ScaledCodes:
    return ScaledCodes(operand.codes.cuda(), operand.dequant_scale.cuda(), operand.kind)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the error over that of the outputs: Hopper sums products of FP8 with about 14 bits, so elements differ."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [E4M3, E5M2, FP16])
def test_every_16_bit_number_is_encoded_as_on_a_cpu(dtype: torch.dtype) -> None:
    """All of bf16 and fp16, at scales that make nothing, much and everything overflow."""
    for wide in (BF16, FP16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(wide)
        for scale in (2.0**-100, 2.0**-10, 1.0, 0.3, 2.0**20):
            expected = kernels.encode(x, torch.tensor(scale), dtype)
            actual = kernels.encode(x.cuda(), torch.tensor(scale, device="cuda"), dtype).cpu()
            if dtype == FP16:
                torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
            else:
                assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kind", ScaleKind)
@pytest.mark.parametrize("wide", [FP32, BF16])
def test_large_operands_equal_those_of_a_cpu(kind: ScaleKind, wide: torch.dtype) -> None:
    x = mixed_magnitudes(2048 + 40, 1024 + 24).to(wide)
    x[3, 140], x[1500, 5], x[7, 900] = torch.finfo(wide).max, math.nan, -math.inf
    expected = kernels.quantize_operand(x, E4M3, kind, sides="both")
    actual = kernels.quantize_operand(x.cuda(), E4M3, kind, sides="both")
    for (codes, scale, _), (expected_codes, expected_scale, _) in zip(actual[:2], expected[:2], strict=True):
        assert torch.equal(codes.cpu().view(torch.uint8), expected_codes.view(torch.uint8))
        assert torch.equal(scale.cpu(), expected_scale)


class TestProducts:
    """Whatever `plan` chooses on this device."""

    @pytest.mark.parametrize("out_dtype", [FP32, BF16, FP16])
    @pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
    @pytest.mark.parametrize(("a_kind", "b_kind"), KIND_PAIRS)
    @pytest.mark.parametrize("shape", [(256, 512, 384), (1, 144, 16), (129, 300, 77), (3, 1000, 130), (8, 16, 16)])
    def test_equal_the_references(
        self,
        shape: tuple[int, int, int],
        a_kind: ScaleKind,
        b_kind: ScaleKind,
        dtypes: tuple[torch.dtype, torch.dtype],
        out_dtype: torch.dtype,
    ) -> None:
        num_rows, num_summed, num_out = shape
        a = quantized(gaussian(num_rows, num_summed), a_kind, dtypes[0])
        b = quantized(gaussian(num_out, num_summed, seed=1), b_kind, dtypes[1])
        expected = kernels.matmul(a, b)
        actual = kernels.matmul(on_gpu(a), on_gpu(b), out_dtype)
        assert actual.dtype == out_dtype
        assert relative_error(actual.cpu(), expected) <= (2e-3 if out_dtype == FP32 else 4e-3)

    @pytest.mark.parametrize(("a_dtype", "min_db"), [(E4M3, 28.0), (E5M2, 24.0)])
    @pytest.mark.parametrize(("a_kind", "b_kind"), KIND_PAIRS[3:])
    def test_quality_per_tile(self, a_kind: ScaleKind, b_kind: ScaleKind, a_dtype: torch.dtype, min_db: float) -> None:
        a, b = mixed_magnitudes(384, 512, seed=0), mixed_magnitudes(256, 512, seed=1)
        out = kernels.matmul(quantized(a.cuda(), a_kind, a_dtype), quantized(b.cuda(), b_kind))
        assert_sqnr(out.cpu(), (a.double() @ b.double().t()).float(), min_db)

    def test_both_backends_agree(self) -> None:
        for a_kind, b_kind in (KIND_PAIRS[0], KIND_PAIRS[1], *KIND_PAIRS[3:]):
            a, b = quantized(gaussian(256, 1024).cuda(), a_kind), quantized(gaussian(384, 1024, seed=1).cuda(), b_kind)
            by_triton = gemm.triton_matmul(a, b, FP32, 2)
            assert relative_error(kernels.matmul(a, b), by_triton) <= 2e-3

    def test_fast_accumulation_is_near(self) -> None:
        a, b = quantized(gaussian(256, 4096).cuda(), TENSOR), quantized(gaussian(384, 4096, seed=1).cuda(), TENSOR)
        precise, fast = (kernels.matmul(a, b, fast_accumulation=is_fast) for is_fast in (False, True))
        assert relative_error(fast, precise) <= 1e-2

    def test_transposed_views_are_operands(self) -> None:
        a, b = quantized(gaussian(256, 512), TENSOR), quantized(gaussian(512, 384), TENSOR)
        expected = kernels.matmul(a, b.t())
        assert relative_error(kernels.matmul(on_gpu(a), on_gpu(b).t()).cpu(), expected) <= 2e-3
