"""The kernel that measures a sample of an operand against its plain-torch twin."""

from typing import Any

import pytest
import torch

from octet.worker.kernels import ScaledCodes, ScaleKind, quantize, reference
from octet.worker.kernels.cuda import language, measurement
from tests.numerics.measure import mixed_magnitudes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
DEVICE = "cpu" if language.INTERPRETED.value else "cuda"


def measured_by(module: Any, *given: Any) -> torch.Tensor:
    out = torch.zeros(5, device=given[0].device)
    module.measure(*given, out)
    return out


def check(x: torch.Tensor, quantized: ScaledCodes, unit: torch.Tensor | None = None) -> torch.Tensor:
    measured = measured_by(measurement, x, quantized, unit)
    on_cpu = ScaledCodes(quantized.codes.cpu(), quantized.dequant_scale.cpu(), quantized.kind)
    expected = measured_by(reference, x.cpu(), on_cpu, unit)
    assert torch.equal(measured[:4].cpu(), expected[:4])
    torch.testing.assert_close(measured[4].cpu(), expected[4], rtol=0, atol=1e-3)
    return measured


SAMPLED, WHOLE = ((300, 1500), torch.bfloat16), ((129, 130), torch.float32)


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        *[(*WHOLE, kind) for kind in ScaleKind],
        (*SAMPLED, ScaleKind.BLOCK_128X128),
        *[pytest.param(*SAMPLED, kind, marks=pytest.mark.matrix) for kind in ScaleKind if kind is not ScaleKind.BLOCK_128X128],
    ],
    ids=str,
)
def test_every_kind_of_scale(shape: tuple[int, int], dtype: torch.dtype, kind: ScaleKind) -> None:
    x = mixed_magnitudes(*shape).to(DEVICE, dtype)
    x[0, :7] = torch.tensor([0.0, 1e-30, -1e-30, 0.25, -3.0, 1e3, -1e3])
    quantized = ScaledCodes(*quantize(x, torch.float8_e4m3fn, kind.granularity, block=kind.block), kind)
    assert check(x, quantized)[3] > 0  # some elements are lost


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_clamped_elements_of_a_transposed_matrix_in_other_units(dtype: torch.dtype) -> None:
    x = mixed_magnitudes(200, 70).to(DEVICE, torch.float16)
    codes, dequant_scale = quantize(x.t(), dtype, amax=x.abs().amax().float() / 8)
    numbers = check(x.t(), ScaledCodes(codes, dequant_scale, ScaleKind.TENSOR), torch.tensor(2.0**-5))
    assert numbers[0] == x.abs().amax().float() * 2**-5
    assert numbers[2] > 0
    view = ScaledCodes(codes.t(), dequant_scale, ScaleKind.TENSOR)
    assert torch.equal(check(x, view, torch.tensor(2.0**-5)), numbers)


def test_nothing_rounded_and_one_element() -> None:
    x = torch.full((1, 1), 3.0, device=DEVICE)
    numbers = check(x, ScaledCodes(*quantize(x, torch.float8_e4m3fn), ScaleKind.TENSOR))
    assert numbers.tolist() == [3.0, 2.0**-7, 0.0, 0.0, 200.0]


def test_noise_that_is_not_a_number_has_no_decibels() -> None:
    x = torch.full((2, 16), 3.0, device=DEVICE)
    quantized = ScaledCodes(*quantize(x, torch.float8_e4m3fn), ScaleKind.TENSOR)
    x[1, 3] = torch.nan
    for module in (measurement, reference):
        assert measured_by(module, x, quantized, None)[4].isnan()
