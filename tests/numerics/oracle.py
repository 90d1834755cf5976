"""An independent definition of the quantizers, in NumPy and ml_dtypes. Shares no code with the worker."""

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
    if amax == 0 or not math.isfinite(amax):
        return np.float32(previous)
    return np.float32(2.0 ** -quant_exponent(amax, MAX[dtype], margin))


def groups(shape: tuple[int, int], granularity: str, block: tuple[int, int]) -> list[tuple[slice, slice]]:
    """The slices that share a scale, in the order of the dequant_scale's elements."""
    rows, columns = {"tensor": shape, "row": (1, shape[1]), "block": block}[granularity]
    return [
        (slice(row, row + rows), slice(column, column + columns))
        for row in range(0, shape[0], max(rows, 1))
        for column in range(0, shape[1], max(columns, 1))
    ]


def quantize(x: np.ndarray, dtype: str, granularity: str, block: tuple[int, int] = (1, 128)) -> tuple[np.ndarray, np.ndarray]:
    """(codes as unsigned integers, dequant_scales in order) of a matrix, one group at a time."""
    x = np.asarray(x, np.float64)
    codes = np.zeros(x.shape, np.uint16 if dtype == "float16" else np.uint8)
    scales = []
    for group in groups(x.shape, granularity, block):
        values = x[group]
        scale = dequant_scale(float(np.max(np.abs(values))), dtype)  # np.max propagates NaN
        scaled = np.clip(values / np.float64(scale), -MAX[dtype], MAX[dtype]).astype(np.float32)
        group_codes = scaled.astype(CAST[dtype]).view(codes.dtype)
        codes[group] = np.where(np.isfinite(values), group_codes, NAN_CODE[dtype])
        scales.append(scale)
    return codes, np.array(scales, np.float32)
