"""Norms of gradients, and clipping by them, against their plain-torch twins: codes and values, orders 1, 2, 3 and infinity."""

import math

import pytest
import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.kernels import gradient_reference as reference
from octet.worker.kernels.cuda import gradient_norms, language
from tests.numerics.measure import mixed_magnitudes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
DEVICE = "cpu" if language.INTERPRETED.value else "cuda"
E4M3 = torch.float8_e4m3fn
SIZES = (1, 127, 129, 4096, 20_000)
ORDERS = (2.0, math.inf, 1.0, 3.0)
NAN = torch.tensor(torch.nan, device=DEVICE)
interpreted = pytest.mark.skipif(
    not language.INTERPRETED.value, reason="missing: Triton's interpreter, TRITON_INTERPRET=1 before the start"
)


def values_of(size: int, seed: int = 0) -> Tensor:
    return mixed_magnitudes(-(-size // 128), 128, seed).view(-1)[:size].to(DEVICE)


def mixed(sizes: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients in codes, one with a negative scale, and in each dtype of values; and what clipping multiplies."""
    gradients: list[Tensor] = []
    scaled: list[Tensor] = []
    for seed, size in enumerate(sizes):
        codes, dequant_scale = kernels.quantize(values_of(size, seed), E4M3)
        values = values_of(size, seed + 9)
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        plain = [values.to(dtype) if dtype != torch.float16 else values.clamp(-100, 100).half() for dtype in dtypes]
        gradients += [codes, *plain]
        scaled += [dequant_scale if seed else -dequant_scale, *plain]
    return gradients, scaled


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", SIZES)
def test_norm(size: int, order: float) -> None:
    codes, dequant_scale = kernels.quantize(values_of(size), E4M3)
    expected = torch.linalg.vector_norm(kernels.dequantize(codes, dequant_scale).double(), order)
    found = gradient_norms.norms([codes], [dequant_scale], order)[0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6 if order in (2.0, math.inf) else 1e-5, atol=0)


@pytest.mark.parametrize("order", ORDERS)
def test_complex_gradients_have_the_norm_and_the_clipping_of_torch(order: float) -> None:
    codes, dequant_scale = kernels.quantize(values_of(300), E4M3)
    given = torch.complex(values_of(129, 1), values_of(129, 2))
    wide = [kernels.dequantize(codes, dequant_scale), given]
    expected = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part, order) for part in wide]), order)
    found = gradient_norms.total_norm([codes, given], [dequant_scale, given], order)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    clipped, scale = given.clone(), dequant_scale.clone()
    gradient_norms.clip_([codes, clipped], [scale, clipped], found, float(found) / 4)
    torch.testing.assert_close(clipped, given / 4, rtol=1e-5, atol=0)
    torch.testing.assert_close(scale, dequant_scale / 4, rtol=1e-5, atol=0)


@pytest.mark.parametrize("order", ORDERS)
def test_a_gradient_that_is_not_finite_makes_the_norm_nan(order: float) -> None:
    codes, dequant_scale = kernels.quantize(values_of(300), E4M3)
    assert gradient_norms.norms([codes], [NAN], order)[0].isnan()
    assert gradient_norms.total_norm([codes, codes], [dequant_scale, NAN], order).isnan()
    infinite = torch.tensor([1.0, -torch.inf], device=DEVICE)
    assert gradient_norms.total_norm([codes, infinite], [dequant_scale, infinite], order) == torch.inf


@interpreted
@pytest.mark.parametrize("sizes", [(1, 127, 5000), (4096, 16)], ids=["odd", "aligned"])
@pytest.mark.parametrize("order", ORDERS)
def test_norms_of_all_gradients_are_two_launches(sizes: tuple[int, ...], order: float, launched: list[str]) -> None:
    pairs = [kernels.quantize(values_of(size, seed), E4M3) for seed, size in enumerate(sizes)]
    codes, scales, values = [pair[0] for pair in pairs], [-pair[1] for pair in pairs], [values_of(size) for size in sizes]
    gradients, scaled = [values[0], *codes, *values[1:]], [values[0], *scales, *values[1:]]
    found, total = gradient_norms.norms(gradients, scaled, order), gradient_norms.total_norm(gradients, scaled, order)
    torch.testing.assert_close(found, reference.norms(gradients, scaled, order), rtol=1e-5, atol=0)
    torch.testing.assert_close(total, reference.total_norm(gradients, scaled, order), rtol=1e-5, atol=0)
    assert launched == ["norm_parts_kernel", "norms_kernel", "norm_parts_kernel", "total_norm_kernel"]


@interpreted
@pytest.mark.parametrize("sizes", [(1, 127, 20_000), (4096, 16)], ids=["odd", "aligned"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_of_all_and_its_clip_are_three_launches(sizes: tuple[int, ...], order: float, launched: list[str]) -> None:
    gradients, scaled = mixed(sizes)
    wide = [part.double() for part in reference_values(gradients, scaled)]
    norm = gradient_norms.total_norm(gradients, scaled, order)
    expected = torch.linalg.vector_norm(torch.cat([part.reshape(-1) for part in wide]), order)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0)
    codes = [gradient.clone() for gradient in gradients if gradient.dtype == E4M3]
    gradient_norms.clip_(gradients, scaled, norm, float(expected) / 3)
    assert launched == ["norm_parts_kernel", "total_norm_kernel", "clip_kernel"]
    for before, after in zip(wide, reference_values(gradients, scaled), strict=True):
        tolerance = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(after.dtype, 2**-20)
        torch.testing.assert_close(after.double(), before / 3, rtol=tolerance, atol=2**-24)  # atol: fp16's subnormals
    held = [gradient for gradient in gradients if gradient.dtype == E4M3]
    assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(codes, held, strict=True))


@pytest.mark.parametrize("norm", [0.0, 0.5, 3.0, 1e30, torch.inf, torch.nan])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e39, math.inf])
def test_clipping_has_the_bits_of_the_twin(norm: float, max_norm: float) -> None:
    values, total = values_of(5000), torch.tensor(norm, device=DEVICE)
    codes, dequant_scale = kernels.quantize(values_of(300), E4M3)
    actual, expected = [[dequant_scale.clone(), values.clone()] for _ in range(2)]
    gradient_norms.clip_([codes, actual[1]], actual, total, max_norm)
    reference.clip_([codes, expected[1]], expected, total, max_norm)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_values_that_are_not_contiguous_are_scaled_too() -> None:
    values = values_of(4096).view(64, 64)
    transposed, plain = values.clone().t(), values.clone()
    norm = gradient_norms.total_norm([transposed, plain], [transposed, plain], 2.0)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(values) * math.sqrt(2), rtol=1e-6, atol=0)
    gradient_norms.clip_([transposed, plain], [transposed, plain], norm, float(norm) / 2)
    torch.testing.assert_close(plain, values / 2, rtol=1e-6, atol=0)
    assert torch.equal(transposed.t(), plain)


def test_gradients_without_elements_launch_nothing_that_fails() -> None:
    empty = torch.zeros(0, device=DEVICE)
    assert gradient_norms.total_norm([empty], [empty], 2.0) == 0
    gradient_norms.clip_([empty], [empty], torch.ones((), device=DEVICE), 1.0)


def reference_values(gradients: list[Tensor], scaled: list[Tensor]) -> list[Tensor]:
    return [
        kernels.dequantize(gradient, scale) if gradient.dtype == E4M3 else gradient.clone()
        for gradient, scale in zip(gradients, scaled, strict=True)
    ]
