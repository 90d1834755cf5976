"""The storage formats with their constants, and the scale for an amax: a power of two, computed exactly."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128  # elements that share a scale along the last dimension
MX_BLOCK = 32  # the same in the formats of OCP's Microscaling (MX) specification, version 1.0
SCALE_EXPONENT_MAX = 126  # 2**126 and 2**-126 are both normal in fp32, so a scale and its inverse always are


@dataclass(frozen=True)
class Format:
    """A binary floating-point format; a code is sign, exponent and mantissa read as an integer."""

    dtype: torch.dtype
    mantissa_bits: int
    min_exponent: int  # of the smallest normal number
    max: float
    nan_code: int  # the one NaN that we write


E4M3 = Format(torch.float8_e4m3fn, 3, -6, 448.0, 0x7F)
E5M2 = Format(torch.float8_e5m2, 2, -14, 57344.0, 0x7F)
FP16 = Format(torch.float16, 10, -14, 65504.0, 0x7E00)
BF16 = Format(torch.bfloat16, 7, -126, torch.finfo(torch.bfloat16).max, 0x7FC0)

SCALED_FORMATS = {format.dtype: format for format in (E4M3, E5M2, FP16)}
ROUNDED_FORMATS = {format.dtype: format for format in (E4M3, E5M2, FP16, BF16)}


def dequant_scale_from_amax(amax: Tensor, dtype: torch.dtype, margin: int = 0, previous: Tensor | None = None) -> Tensor:
    """The fp32 dequant_scale for each amax: the inverse of `2^(floor(log2(max_of_format / amax)) - margin)`.

    The logarithm comes from the exponent and mantissa of amax, so no rounding of a quotient can move it. The exponent
    is clamped to ±126. Where amax is 0 or not finite the previous scale is kept (1 without one); callers look at amax
    to flag the latter.
    """
    limit_mantissa, limit_exponent = math.frexp(SCALED_FORMATS[dtype].max)
    mantissa, exponent = torch.frexp(amax.float())
    quant_exponent = limit_exponent - exponent - (mantissa > limit_mantissa).int() - margin
    quant_exponent = quant_exponent.clamp(-SCALE_EXPONENT_MAX, SCALE_EXPONENT_MAX)
    dequant_scale = ((127 - quant_exponent) << 23).view(torch.float32)  # 2**-quant_exponent, built from its bits
    return torch.where((amax > 0) & (amax < torch.inf), dequant_scale, 1.0 if previous is None else previous)


def finite_or_nan(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The dequant_scale for an amax; NaN where the amax is not finite, so that the scale alone tells whether a gradient is."""
    return torch.where(amax.isfinite(), dequant_scale_from_amax(amax, dtype), torch.nan)
