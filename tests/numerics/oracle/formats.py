"""The meaning of codes and scales, defined once more in NumPy and ml_dtypes: `value = codes × dequant_scale`.

In this folder only the tests may import the code under test (`test_independence.py`). Formats have torch's names.
"""

import math

import ml_dtypes
import numpy as np

MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float16": 65504.0}
CAST = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "float16": np.float16}
NAN_CODE = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F, "float16": 0x7E00}


def quant_exponent(amax: float, limit: float, margin: int = 0) -> int:
    """floor(log2(limit / amax)) - margin by exact rational comparison, clamped to ±126; amax positive and finite."""
    exponent = 0
    limit_numerator, limit_denominator = limit.as_integer_ratio()
    amax_numerator, amax_denominator = float(amax).as_integer_ratio()
    numerator, denominator = limit_numerator * amax_denominator, limit_denominator * amax_numerator
    exponent = numerator.bit_length() - denominator.bit_length()
    if numerator << max(-exponent, 0) < denominator << max(exponent, 0):
        exponent -= 1
    return min(max(exponent - margin, -126), 126)


def dequant_scale(amax: float, dtype: str, margin: int = 0, previous: float = 1.0) -> np.float32:
    """The scale for an amax; the one before if the amax is zero or not finite."""
    if amax == 0 or not math.isfinite(amax):
        return np.float32(previous)
    return np.float32(2.0 ** -quant_exponent(amax, MAX[dtype], margin))


def groups(shape: tuple[int, int], granularity: str, block: tuple[int, int]) -> list[tuple[slice, slice]]:
    """The slices that share a scale, in the order of the dequant_scale's elements."""
    rows, columns = {"tensor": shape, "row": (1, shape[1]), "block": block, "mx": (1, 32)}[granularity]
    return [
        (slice(row, row + rows), slice(column, column + columns))
        for row in range(0, shape[0], max(rows, 1))
        for column in range(0, shape[1], max(columns, 1))
    ]


def encode(values: np.ndarray, scale: float, dtype: str) -> np.ndarray:
    """Codes, as unsigned integers, at a given scale: saturating; NaN where a value is not finite."""
    with np.errstate(invalid="ignore"):
        scaled = np.clip(values / np.float64(scale), -MAX[dtype], MAX[dtype]).astype(np.float32)
        codes = scaled.astype(CAST[dtype]).view(np.uint16 if dtype == "float16" else np.uint8)
    return np.where(np.isfinite(values), codes, NAN_CODE[dtype]).astype(codes.dtype)


def decode(codes: np.ndarray, dtype: str) -> np.ndarray:
    """The values of codes given as unsigned integers, at a scale of 1, in fp64."""
    return codes.view(CAST[dtype]).astype(np.float64)


def decode_split(codes: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """The values, at a scale of 1, of E4M3 codes (uint8) with the INT8 position inside each code's rounding interval, fp64.

    Together they are a number with the exponents of E4M3 and 11 bits of mantissa.
    """
    fine = ((codes & 0x7F).astype(np.int64) << 8) + residual
    exponent, mantissa = fine >> 11, fine & 0x7FF
    magnitude = np.where(exponent == 0, mantissa * 2.0**-17, (1 + mantissa / 2048) * 2.0 ** (exponent - 7))
    return np.where(codes & 0x80, -magnitude, magnitude)


def quantize(x: np.ndarray, dtype: str, granularity: str, block: tuple[int, int] = (1, 128)) -> tuple[np.ndarray, np.ndarray]:
    """(codes as unsigned integers, dequant_scales in order) of a matrix, one group at a time."""
    x = np.asarray(x, np.float64)
    codes = np.zeros(x.shape, np.uint16 if dtype == "float16" else np.uint8)
    scales = []
    for group in groups(x.shape, granularity, block):
        scale = dequant_scale(float(np.max(np.abs(x[group]))), dtype)  # np.max propagates NaN
        codes[group] = encode(x[group], float(scale), dtype)
        scales.append(scale)
    return codes, np.array(scales, np.float32)


def rounded(x: np.ndarray, dtype: str, granularity: str, block: tuple[int, int] = (1, 128)) -> np.ndarray:
    """The values, fp64, that a matrix has once it is quantized."""
    codes, scales = quantize(x, dtype, granularity, block)
    values = decode(codes, dtype)
    for scale, group in zip(scales, groups(x.shape, granularity, block), strict=True):
        values[group] *= np.float64(scale)
    return values
