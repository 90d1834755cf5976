"""Triton device functions that several kernels share: casts, scales from amaxes, random numbers, stochastic rounding.

FP8 codes are loaded and stored as uint8. Triton's interpreter casts to FP8 wrongly where rounding carries into the exponent
(31.5 becomes 16, Triton 3.6 to 3.9), so under it the cast is done on the bits; a device uses its own instruction.
Kernels are launched with `enable_fp_fusion=False`: an addition fused into a multiplication rounds once where the
reference rounds twice.
"""

import triton
import triton.language as tl

from octet.worker.kernels import rounding
from octet.worker.kernels.formats import SCALE_EXPONENT_MAX

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_SCALE_EXPONENT_MAX = tl.constexpr(SCALE_EXPONENT_MAX)

INFINITY = tl.constexpr(float("inf"))
NUMBERS_PER_DRAW = tl.constexpr(rounding.NUMBERS_PER_DRAW)


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient rounded up, on the host. `triton.cdiv` unwraps its arguments first, which takes ten times as long."""
    return -(-dividend // divisor)


@triton.jit
def is_finite(x):
    """Return, for each fp32 element, True if it is finite."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def copysign(magnitude, signed):
    """fp32 with the sign of `signed`, an fp32 (zeros have signs too) or an int32 (its sign bit)."""
    sign = signed.to(tl.int32, bitcast=True) & -0x80000000
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def max_magnitude(a, b):
    """The larger of two non-negative fp32, NaN if either is: a NaN's bits are larger than those of any other number."""
    bits_a, bits_b = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    return tl.where(bits_a > bits_b, bits_a, bits_b).to(tl.float32, bitcast=True)


@triton.jit
def amax(x, AXIS: tl.constexpr):
    """Largest magnitude of fp32 x along an axis; NaN where there is one. Compared as integers, so no NaN is dropped."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, AXIS).to(tl.float32, bitcast=True)


@triton.jit
def atomic_amax(pointer, value):
    """Raise fp32 *pointer, non-negative, to a non-negative value, or to NaN."""
    tl.atomic_max(pointer.to(tl.pointer_type(tl.int32)), value.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def power_of_two(exponent):
    """2**exponent in fp32, -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse(power_of_two):
    """1 / 2**e for -126 <= e <= 126, from its bits."""
    return ((254 << 23) - power_of_two.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def dequant_scale_from_amax(amax, previous, LIMIT: tl.constexpr, MARGIN: tl.constexpr):
    """formats.dequant_scale_from_amax for a format with the largest number LIMIT: 448, 57344 or 65504."""
    LIMIT_EXPONENT: tl.constexpr = 9 if LIMIT == 448.0 else 16
    LIMIT_BITS: tl.constexpr = 0x7FE000 if LIMIT == 65504.0 else 0x600000  # of the mantissa
    is_subnormal = amax < 1.1754943508222875e-38
    normal = tl.where(is_subnormal, tl.minimum(amax, 1.0) * 8388608.0, amax)
    bits = normal.to(tl.int32, bitcast=True)
    exponent = (
        (bits >> 23) - 126 - tl.where(is_subnormal, 23, 0)
    )  # as frexp: amax = mantissa · 2^exponent, mantissa in [0.5, 1)
    exceeds = ((bits & 0x7FFFFF) > LIMIT_BITS).to(tl.int32)
    quant_exponent = LIMIT_EXPONENT - exponent - exceeds - MARGIN
    quant_exponent = tl.minimum(tl.maximum(quant_exponent, -_SCALE_EXPONENT_MAX), _SCALE_EXPONENT_MAX)
    return tl.where((amax > 0) & (amax < INFINITY), power_of_two(-quant_exponent), previous)


@triton.jit
def nearest_code(magnitude, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Nearest-even codes of fp32 magnitudes within the format's range, as int32, from their bits alone."""
    NUM_DROPPED_BITS: tl.constexpr = 23 - MANTISSA_BITS
    bits = magnitude.to(tl.int32, bitcast=True)
    rounded = bits + (1 << (NUM_DROPPED_BITS - 1)) - 1 + ((bits >> NUM_DROPPED_BITS) & 1)
    normal = (rounded >> NUM_DROPPED_BITS) - ((127 - 1 + MIN_EXPONENT) << MANTISSA_BITS)
    # Below the smallest normal number the addition rounds to the format's fixed step.
    step_aligned = tl.full(magnitude.shape, 2.0 ** (NUM_DROPPED_BITS + MIN_EXPONENT), tl.float32)
    subnormal = (magnitude + step_aligned).to(tl.int32, bitcast=True) - step_aligned.to(tl.int32, bitcast=True)
    return tl.where(magnitude < 2.0**MIN_EXPONENT, subnormal, normal)


@triton.jit
def encode_fp8(scaled, IS_E4M3: tl.constexpr):
    """Return the codes of `convert_to_fp8`, computed from the bits for the interpreter; Inf, too, becomes the positive NaN."""
    LIMIT: tl.constexpr = 448.0 if IS_E4M3 else 57344.0
    clamped = tl.where(scaled > LIMIT, LIMIT, tl.where(scaled < -LIMIT, -LIMIT, scaled))
    finite = is_finite(scaled)
    magnitude = tl.where(finite, tl.abs(clamped), 0.0)
    codes = nearest_code(magnitude, 3, -6) if IS_E4M3 else nearest_code(magnitude, 2, -14)
    codes = (codes | ((clamped.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return tl.where(finite, codes, 0x7F).to(tl.uint8)


@triton.jit
def convert_to_fp8(x, FORMAT: tl.constexpr):
    """uint8 codes of fp32 values by the device's own instruction: nearest even, saturating; the positive NaN for NaN.

    It is written out because for compute capability 8.9 Triton 3.7 goes through FP16, truncated: a value just above the
    middle between two codes then becomes the lower one.
    """
    CONVERT: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32" if FORMAT == "e4m3" else "cvt.rn.satfinite.e5m2x2.f32"
    FIRST: tl.constexpr = "{ .reg .b16 low, high; " + CONVERT + " low, $2, $1; "
    ASSEMBLY: tl.constexpr = FIRST + CONVERT + " high, $4, $3; mov.b32 $0, {low, high}; }"
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def decode_fp8(codes, IS_E4M3: tl.constexpr):
    """fp32 values of uint8 codes, read as FP16: E5M2 is its upper byte, E4M3 has an exponent bias 8 lower."""
    wide = codes.to(tl.int32)
    if IS_E4M3:
        magnitude = wide & 0x7F
        bits = (magnitude << 7) | ((wide & 0x80) << 8)
        values = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), values)
    return (wide << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode(codes, FORMAT: tl.constexpr):
    """fp32 values of codes as they are held: uint8 of "e4m3" or "e5m2", or any wider floating-point number."""
    if FORMAT != "e4m3" and FORMAT != "e5m2":
        return codes.to(tl.float32)
    elif INTERPRETED:
        return decode_fp8(codes, FORMAT == "e4m3")
    elif FORMAT == "e4m3":
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return codes.to(tl.float8e5, bitcast=True).to(tl.float32)


@triton.jit
def nan_unless_finite(x):
    """fp32 x with NaN in the place of Inf. On a device one instruction: x · 0 + x."""
    if INTERPRETED:
        return tl.where(is_finite(x), x, float("nan"))
    else:
        return tl.fma(x, 0.0, x)


@triton.jit
def encode_scaled(x, quant_scale, FORMAT: tl.constexpr):
    """Codes of fp32 x · quant_scale as they are stored: uint8 of "e4m3" or "e5m2", or fp16. x: of nan_unless_finite.

    quant_scale broadcasts. A finite x saturates, also where the product overflows. On a device the conversion to FP8
    saturates by itself (PTX, cvt.satfinite) and writes the positive NaN: at the bandwidth of an H200 there is time for
    20 instructions for each element, so one is not spent where it can be saved.
    """
    LIMIT: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0 if FORMAT == "e5m2" else 65504.0
    scaled = x * quant_scale
    if INTERPRETED or FORMAT == "fp16":
        scaled = tl.where(scaled > LIMIT, LIMIT, tl.where(scaled < -LIMIT, -LIMIT, scaled))
    if FORMAT == "fp16":
        return scaled.to(tl.float16)
    elif INTERPRETED:
        return encode_fp8(scaled, FORMAT == "e4m3")
    else:
        return convert_to_fp8(scaled, FORMAT)


@triton.jit
def scale_from_amax(amax, FORMAT: tl.constexpr, MARGIN: tl.constexpr):
    """dequant_scale_from_amax with 1 where amax is 0 or not finite, in a third of its instructions.

    The addition carries into the exponent where the mantissa exceeds that of the format's limit.
    """
    LIMIT: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0 if FORMAT == "e5m2" else 65504.0
    if MARGIN > 8:  # then the scale of a subnormal amax is not that of the smallest normal number
        return dequant_scale_from_amax(amax, 1.0, LIMIT, MARGIN)
    else:
        CARRY: tl.constexpr = 0x1FFF if LIMIT == 65504.0 else 0x1FFFFF
        LIMIT_EXPONENT: tl.constexpr = 8 if LIMIT == 448.0 else 15
        bits = amax.to(tl.int32, bitcast=True)
        exponent = ((bits + CARRY) >> 23) + (MARGIN - LIMIT_EXPONENT)
        exponent = tl.minimum(tl.maximum(exponent, 127 - _SCALE_EXPONENT_MAX), 127 + _SCALE_EXPONENT_MAX)
        is_positive = (bits > 0) & (bits < 0x7F800000)
        return tl.where(is_positive, exponent << 23, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def over_stored_scale(amax, stored_scale, HAS_STORED_SCALE: tl.constexpr):
    """The amax of x, where it is given of x * stored_scale."""
    if HAS_STORED_SCALE:
        return tl.div_rn(amax, tl.load(stored_scale))
    else:
        return amax


@triton.jit
def times_stored_scale(scale, stored_scale, HAS_STORED_SCALE: tl.constexpr):
    """The scale of x * stored_scale, where it is that of x."""
    if HAS_STORED_SCALE:
        return scale * tl.load(stored_scale)
    else:
        return scale


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """fp32 x rounded to nearest even. Triton's interpreter cuts off bits on the way to bf16 instead."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(is_finite(x), rounded, bits).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def random_numbers(seed, step, stream, first_draw, NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr):
    """rounding.random_bits for NUM_ROWS · NUM_COLUMNS elements from element 8 · first_draw on, as int32 (rows, columns)."""
    draws = tl.arange(0, NUM_ROWS * NUM_COLUMNS // NUMBERS_PER_DRAW).to(tl.int64) + first_draw
    word0, word1 = (draws & 0xFFFFFFFF).to(tl.uint32), (draws >> 32).to(tl.uint32)
    word2, word3 = tl.full(draws.shape, stream, tl.uint32), tl.full(draws.shape, step, tl.uint32)
    key0, key1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        product0, product1 = word0.to(tl.uint64) * 0xD2511F53, word2.to(tl.uint64) * 0xCD9E8D57  # one instruction each
        word0 = (product1 >> 32).to(tl.uint32) ^ word1 ^ key0
        word2 = (product0 >> 32).to(tl.uint32) ^ word3 ^ key1
        word1, word3 = (product1 & 0xFFFFFFFF).to(tl.uint32), (product0 & 0xFFFFFFFF).to(tl.uint32)
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))  # the last two dimensions, flattened, are words 0 to 3
    numbers = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(numbers, (NUM_ROWS, NUM_COLUMNS)).to(tl.int32, bitcast=True)


@triton.jit
def roundable(x, MIN_EXPONENT: tl.constexpr):
    """The bits of |x|, fp32, scaled so that a format's smallest normal number is fp32's: the code, then what is rounded."""
    return (tl.abs(x) * 2.0 ** (-126 - MIN_EXPONENT)).to(tl.int32, bitcast=True)


@triton.jit
def from_roundable(bits, MIN_EXPONENT: tl.constexpr):
    """The fp32 magnitudes that such bits stand for."""
    return bits.to(tl.float32, bitcast=True) * 2.0 ** (126 + MIN_EXPONENT)


@triton.jit
def stochastic_codes(bits, numbers, MANTISSA_BITS: tl.constexpr, MAX_CODE: tl.constexpr):
    """rounding.stochastic_codes of roundable bits, as int32. MAX_CODE: of the format's largest number; a NaN has it too."""
    NUM_DROPPED_BITS: tl.constexpr = 23 - MANTISSA_BITS
    bits = tl.minimum(bits, MAX_CODE << NUM_DROPPED_BITS)
    if NUM_DROPPED_BITS <= 16:
        return ((bits << (16 - NUM_DROPPED_BITS)) + numbers) >> 16
    else:
        MISSING: tl.constexpr = NUM_DROPPED_BITS - 16
        return (bits + (numbers << MISSING) + (1 << (MISSING - 1))) >> NUM_DROPPED_BITS


@triton.jit
def split_decode(codes, residual):
    """rounding.split_decode: the fp32 values of uint8 E4M3 codes with their int8 residual."""
    wide = codes.to(tl.int32)
    fine = ((wide & 0x7F) << 8) + residual.to(tl.int32)
    values = (fine << 12).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    values = tl.where((wide & 0x7F) == 0x7F, float("nan"), values)
    return copysign(values, wide << 24)


@triton.jit
def expansion_decode(codes, steps, amax):
    """DynamicRangeExpansion.decode, of uint8 codes (rows, 128) with int32 steps and fp32 amaxes (rows,).

    The bits of an E4M3 number as fp32 count eighths of a binade from bit 20 on; those of 448 are 1086.
    """
    values = decode_fp8(codes, True) if INTERPRETED else codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = values.to(tl.uint32, bitcast=True)
    step = (steps << 6).to(tl.uint32)
    lowest = amax.to(tl.uint32, bitcast=True) - 1086 * step
    without_sign = bits << 1
    magnitude = lowest[:, None] + tl.umulhi(without_sign, (step << 11)[:, None])  # (bits >> 20) · step
    return copysign(tl.where(without_sign != 0, magnitude, 0).to(tl.float32, bitcast=True), bits.to(tl.int32, bitcast=True))


@triton.jit
def expansion_encode(values, amax):
    """DynamicRangeExpansion.encode: uint8 codes and int32 steps of finite fp32 values (rows, 128), given their amaxes."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    largest = amax.to(tl.int32, bitcast=True)
    is_held = magnitude >= tl.maximum(largest - (128 << 23), 0x800000)[:, None]
    below_amax = largest[:, None] - magnitude
    deepest = tl.max(tl.where(is_held, below_amax, 0), 1)
    steps = (deepest.to(tl.uint32) + (142 * 64 - 1)) // (142 * 64)
    steps = tl.minimum(tl.maximum(steps.to(tl.int32), 514), 16384)
    factor = divide(33554432.0, steps.to(tl.float32)) + 12582912.0  # rounded to an integer, in the lower bits
    factor = factor.to(tl.int32, bitcast=True) - 0x4B400000
    lowered = (below_amax >> 11) * factor[:, None]
    expanded = tl.where(is_held, 0x43E00000 - lowered, 0)
    signed = copysign(expanded.to(tl.float32, bitcast=True), bits)
    return encode_fp8(signed, True) if INTERPRETED else convert_to_fp8(signed, "e4m3"), steps


@triton.jit
def companded_decode(codes, IS_SIGNED: tl.constexpr):
    """Companded.decode without the scale. Put into the last bits of 2^23, a code is an fp32 without a conversion."""
    offset = codes.to(tl.uint8, bitcast=True).to(tl.int32)
    if IS_SIGNED:
        root = ((offset ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0) * (1 / 127)
    else:
        root = ((offset | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0) * (1 / 255)
    square = root * root
    magnitude = square * square
    return copysign(magnitude, root) if IS_SIGNED else magnitude


@triton.jit
def companded_encode(values, numbers, amax, IS_SIGNED: tl.constexpr):
    """Companded.encode: int8 or uint8 codes of fp32 values (rows, 128), given their amaxes."""
    inverse = divide(1.0, tl.minimum(tl.maximum(amax, 2.0**-126), 2.0**126))
    ratio = tl.abs(values) * inverse[:, None]
    root = sqrt(sqrt(tl.maximum(ratio, 2.0**-100)))  # 2^-25 becomes zero, as everything below
    if IS_SIGNED:
        levels = tl.minimum(root * 127.0, 127.0) + 12582912.0  # rounded to an integer, in the lower bits
        levels = levels.to(tl.int32, bitcast=True) - 0x4B400000
        return tl.where(values < 0, -levels, levels).to(tl.int8)
    else:
        return tl.minimum(tl.floor(root * 255.0 + numbers.to(tl.float32) * 2.0**-16), 255.0).to(tl.uint8)


@triton.jit
def _approximate(x, INSTRUCTION: tl.constexpr):
    ASSEMBLY: tl.constexpr = INSTRUCTION + ".approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(ASSEMBLY, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sqrt(x):
    """The correctly rounded root of fp32 x, 2^-101 <= x < Inf: `sqrt.rn` as it is compiled, without its way for other numbers.

    That way is a branch for each element, around a call: it made the optimizer's kernel half as long again.
    """
    if INTERPRETED:
        return tl.sqrt_rn(x)
    else:
        inverse_root = _approximate(x, "rsqrt")
        root = x * inverse_root
        return tl.fma(tl.fma(root * -1.0, root, x), inverse_root * 0.5, root)


@triton.jit
def divide(numerator, denominator):
    """The correctly rounded quotient of fp32, 2^-126 <= denominator <= 2^126: `div.rn` without its way for other numbers.

    Below a numerator of 2^-100 it may be off by the last bit.
    """
    if INTERPRETED:
        return tl.div_rn(numerator, denominator)
    else:
        inverse, minus = _approximate(denominator, "rcp"), denominator * -1.0
        inverse = tl.fma(inverse, tl.fma(minus, inverse, 1.0), inverse)
        quotient = numerator * inverse
        return tl.fma(inverse, tl.fma(minus, quotient, numerator), quotient)
