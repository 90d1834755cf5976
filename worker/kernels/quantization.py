"""Quantize and dequantize: arguments checked, then the implementation for the tensor's device."""

import torch
from torch import Tensor

from worker.kernels import formats
from worker.kernels.dispatch import implementation
from worker.kernels.formats import BLOCK, SCALED_FORMATS, scale_shape

GRANULARITIES = ("tensor", "row", "block")
BLOCKS = ((1, BLOCK), (BLOCK, BLOCK))


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    granularity: str = "tensor",
    *,
    margin: int = 0,
    amax: Tensor | None = None,
    previous_dequant_scale: Tensor | None = None,
    block: tuple[int, int] = (1, BLOCK),
) -> tuple[Tensor, Tensor]:
    """(codes, dequant_scale) of x, any shape and strides, in float8_e4m3fn, float8_e5m2 or float16.

    granularity: one scale for the tensor, for each row (last dimension), or for each block of 1×128 or 128×128
    elements. amax: use this instead of x's own, e.g. one reduced over ranks; shaped like compute_amax's result.
    previous_dequant_scale: kept where amax is 0 or not finite (1 without one).
    A non-finite element becomes a NaN code, and makes its group's amax non-finite: see compute_amax and all_finite.
    """
    x = x.detach()
    if amax is None:
        amax = compute_amax(x, granularity, block)
    dequant_scale = dequant_scale_from_amax(amax, dtype, margin, previous_dequant_scale)
    return encode(x, dequant_scale, dtype), dequant_scale


def compute_amax(x: Tensor, granularity: str = "tensor", block: tuple[int, int] = (1, BLOCK)) -> Tensor:
    """Largest magnitude per scale in fp32, on x's device; non-finite where the group has a non-finite element."""
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity is {granularity!r}; allowed: {', '.join(GRANULARITIES)}.")
    if block not in BLOCKS:
        raise ValueError(f"block is {block}; allowed: (1, 128) for activations and gradients, (128, 128) for weights.")
    if x.ndim == 0 and granularity != "tensor":
        raise ValueError(f'granularity {granularity!r} needs at least one dimension; x has none. Use "tensor".')
    return implementation(x.device).compute_amax(x.detach(), granularity, block)


def dequant_scale_from_amax(amax: Tensor, dtype: torch.dtype, margin: int = 0, previous: Tensor | None = None) -> Tensor:
    """The power-of-two fp32 dequant_scale for each amax (NUMERICS.md, section 3); see formats.py."""
    _check_scaled_dtype(dtype)
    return formats.dequant_scale_from_amax(amax.detach(), dtype, margin, previous)


def encode(x: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of x at a given dequant_scale, e.g. one from past amaxes: nearest even, saturating, NaN for non-finite."""
    _check_scaled_dtype(dtype)
    _check_scale_shape(dequant_scale, x.shape)
    return implementation(x.device).encode(x.detach(), dequant_scale, dtype)


def dequantize(codes: Tensor, dequant_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes × dequant_scale in dtype, rounded once. The granularity follows from the shape of dequant_scale."""
    _check_scaled_dtype(codes.dtype)
    _check_scale_shape(dequant_scale, codes.shape)
    return implementation(codes.device).dequantize(codes, dequant_scale, dtype)


def all_finite(x: Tensor) -> Tensor:
    """Whether no element of a tensor, or of codes, is NaN or Inf: a 0-dim bool on x's device, no host sync."""
    return implementation(x.device).all_finite(x.detach())


def sqrt(x: Tensor) -> Tensor:
    """The root of an fp32 tensor, correctly rounded, as IEEE arithmetic has it, so the same on every device."""
    return implementation(x.device).sqrt(x)


def _check_scaled_dtype(dtype: torch.dtype) -> None:
    if dtype not in SCALED_FORMATS:
        allowed = ", ".join(str(known) for known in SCALED_FORMATS)
        raise ValueError(f"codes cannot have dtype {dtype}; allowed: {allowed}. Other dtypes are stored without a scale.")


def _check_scale_shape(dequant_scale: Tensor, shape: torch.Size) -> None:
    if dequant_scale.ndim == 0:
        return
    allowed = {scale_shape(shape, "row"), *(scale_shape(shape, "block", block) for block in BLOCKS)}
    if tuple(dequant_scale.shape) not in allowed:
        raise ValueError(
            f"dequant_scale has shape {tuple(dequant_scale.shape)} for a tensor {tuple(shape)}; allowed: (), for the "
            f"whole tensor, or for rows and blocks {sorted(allowed)}. Pass the scale that quantize returned."
        )
