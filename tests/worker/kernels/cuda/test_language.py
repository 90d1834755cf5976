"""The device functions against the plain-torch reference, bit for bit, on every code and on inputs that can fail."""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from octet.worker import kernels
from octet.worker.kernels import ScaleKind, reference, rounding
from octet.worker.kernels.cuda import language
from octet.worker.kernels.formats import BF16, E4M3, E5M2, FP16, Format
from tests.numerics.measure import mixed_magnitudes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter, about NaN and overflow
DEVICE = "cpu" if language.INTERPRETED.value else "cuda"
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


@triton.jit
def _encode(x, out, N: tl.constexpr, IS_E4M3: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, language.encode_fp8(tl.load(x + offsets), IS_E4M3))


@triton.jit
def _decode(codes, out, N: tl.constexpr, IS_E4M3: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, language.decode_fp8(tl.load(codes + offsets), IS_E4M3))


@triton.jit
def _scale(amax, previous, out, N: tl.constexpr, LIMIT: tl.constexpr, MARGIN: tl.constexpr):
    offsets = tl.arange(0, N)
    scales = language.dequant_scale_from_amax(tl.load(amax + offsets), tl.load(previous + offsets), LIMIT, MARGIN)
    tl.store(out + offsets, scales)


@triton.jit
def _scale_alone(amax, out, N: tl.constexpr, FORMAT: tl.constexpr, MARGIN: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, language.scale_from_amax(tl.load(amax + offsets), FORMAT, MARGIN))


@triton.jit
def _numbers(out, seed, step, stream, first_draw, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    step, stream = tl.full((), step, tl.int64), tl.full((), stream, tl.int64)
    tl.store(out + offsets, language.random_numbers(seed, step, stream, first_draw, ROWS, COLUMNS))


@triton.jit
def _stochastic(x, numbers, out, N: tl.constexpr, BITS: tl.constexpr, EXPONENT: tl.constexpr, MAX: tl.constexpr):
    offsets = tl.arange(0, N)
    bits = language.roundable(tl.load(x + offsets), EXPONENT)
    tl.store(out + offsets, language.stochastic_codes(bits, tl.load(numbers + offsets), BITS, MAX))


@triton.jit
def _roundable(x, out, N: tl.constexpr, EXPONENT: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, language.from_roundable(language.roundable(tl.load(x + offsets), EXPONENT), EXPONENT))


@triton.jit
def _root_and_quotient(x, y, root, quotient, N: tl.constexpr):
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(root + offsets, language.sqrt(tl.load(y + offsets)))
    tl.store(quotient + offsets, language.divide(tl.load(x + offsets), tl.load(y + offsets)))


def hard_values(format: Format) -> Tensor:
    """Every code, every midpoint between two and its neighbours, beyond the range, zeros and non-finite: 4096 fp32 numbers."""
    codes = torch.arange(256, dtype=torch.uint8).view(format.dtype).float()
    codes = codes[codes.isfinite()].unique()
    midpoints = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([torch.nextafter(midpoints, torch.tensor(side * math.inf)) for side in (1, -1)])
    edges = torch.tensor([format.max * 1.01, -format.max * 1e6, 1e-30, -1e-45, -0.0, math.nan, -math.nan, math.inf, -math.inf])
    values = torch.cat([codes, midpoints, near, edges, mixed_magnitudes(16, 128).reshape(-1)])
    return torch.nn.functional.pad(values, (0, 4096 - values.numel()), value=31.5).to(DEVICE)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_encode(format: Format) -> None:
    values = hard_values(format)
    out = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
    _encode[(1,)](values, out, 4096, format is E4M3)
    expected = reference.encode(values, torch.ones((), device=DEVICE), ScaleKind.TENSOR, format.dtype)
    assert torch.equal(out, expected.view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_decode(format: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(256, device=DEVICE)
    _decode[(1,)](codes, out, 256, format is E4M3)
    torch.testing.assert_close(out, codes.view(format.dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16], ids=str)
def test_scale(dtype: torch.dtype, margin: int) -> None:
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    amaxes = torch.cat([powers * factor for factor in (1, 1.75, 1.7500002, 1.9990234375, 1.9999)]).float()
    amaxes = torch.cat([amaxes, torch.tensor([0.0, math.inf, math.nan])])
    amaxes = torch.nn.functional.pad(amaxes, (0, 2048 - amaxes.numel()), value=3.0).to(DEVICE)
    previous = torch.full((2048,), 0.125, device=DEVICE)
    out = torch.empty(2048, device=DEVICE)
    _scale[(1,)](amaxes, previous, out, 2048, float(kernels.formats.SCALED_FORMATS[dtype].max), margin)
    expected = kernels.dequant_scale_from_amax(amaxes, dtype, margin, previous)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("margin", [-3, 0, 8, 9, 40])
@pytest.mark.parametrize("format", [E4M3, E5M2, FP16], ids=["e4m3", "e5m2", "fp16"])
def test_scale_in_fewer_instructions(format: Format, margin: int) -> None:
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    amaxes = torch.cat([powers * factor for factor in (1, 1.75, 1.7500002, 1.9990234375, 1.9999)]).float()
    amaxes = torch.cat([amaxes, torch.tensor([0.0, math.inf, math.nan])])
    amaxes = torch.nn.functional.pad(amaxes, (0, 2048 - amaxes.numel()), value=3.0).to(DEVICE)
    out = torch.empty(2048, device=DEVICE)
    name = {E4M3.dtype: "e4m3", E5M2.dtype: "e5m2", FP16.dtype: "fp16"}[format.dtype]
    _scale_alone[(1,)](amaxes, out, 2048, name, margin)
    assert torch.equal(out, kernels.dequant_scale_from_amax(amaxes, format.dtype, margin))


@pytest.mark.parametrize("first_draw", [0, 5, 2**33 + 1])
def test_random_numbers(first_draw: int) -> None:
    seed, step, stream = 0x123456789ABCDEF, 7, (1 << 31) + 3
    out = torch.empty(8, 128, dtype=torch.int32, device=DEVICE)
    _numbers[(1,)](out, seed, step, stream, first_draw, 8, 128)
    expected = rounding.random_bits(seed, step, stream, range(8 * first_draw, 8 * first_draw + 1024), torch.device(DEVICE))
    assert torch.equal(out.view(-1), expected)


@pytest.mark.parametrize("format", [E4M3, E5M2, FP16, BF16, rounding.E4M11], ids=["e4m3", "e5m2", "fp16", "bf16", "e4m11"])
def test_stochastic_codes(format: Format) -> None:
    values = hard_values(E4M3)
    numbers = rounding.random_bits(1, 2, 3, range(4096), torch.device(DEVICE))
    out = torch.empty(4096, dtype=torch.int32, device=DEVICE)
    exponent = math.frexp(format.max)[1] - format.min_exponent  # of the largest number, as it is stored
    significand = int(math.ldexp(format.max, format.mantissa_bits + 1 - math.frexp(format.max)[1]))
    max_code = ((exponent - 1) << format.mantissa_bits) + significand
    _stochastic[(1,)](values, numbers, out, 4096, format.mantissa_bits, format.min_exponent, max_code)
    expected = rounding.stochastic_codes(values, format, numbers)
    assert torch.equal(out, expected.where(values.isfinite(), max_code))  # who needs to know of a NaN looks at the bits


@pytest.mark.parametrize("exponent", [-126, -14, -6])
def test_roundable_bits_stand_for_the_magnitude(exponent: int) -> None:
    """Exact for what the format holds as a normal number, rounded below, and never finite for what is not."""
    values = hard_values(FP16)
    out = torch.empty_like(values)
    _roundable[(1,)](values, out, 4096, exponent)
    scale = 2.0 ** (-126 - exponent)
    expected = values.abs() * scale / scale
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out[expected >= 2.0**exponent], values.abs()[expected >= 2.0**exponent])


def test_roots_and_quotients_are_correctly_rounded() -> None:
    """Over their whole range; the numerators from 2^-100 on, both signs and zero."""
    generator = torch.Generator().manual_seed(0)
    num_values = 4096 if language.INTERPRETED.value else 1 << 22
    exponents = torch.randint(-100, 126, (2, num_values), generator=generator)
    x, y = (torch.rand(2, num_values, generator=generator) + 1) * torch.exp2(exponents.float())
    x[::2] *= -1
    x[5], y[:3] = 0, torch.tensor([2.0**-101, 2.0**126, 1.0])
    x = torch.where((x.double() / y.double()).abs() < 2.0**-126, 1.0, x)  # a quotient that is subnormal is rounded twice
    x, y = x.to(DEVICE), y.to(DEVICE)
    root, quotient = torch.empty_like(y), torch.empty_like(y)
    _root_and_quotient[(num_values // 4096,)](x, y, root, quotient, 4096)
    assert torch.equal(root, y.double().sqrt().float())
    assert torch.equal(quotient, (x.double() / y.double()).float())  # 53 bits are enough not to round twice
