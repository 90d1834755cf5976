"""Quantize and dequantize: arguments checked, then the op."""

from typing import NamedTuple

import torch
from torch import Tensor

from worker.kernels import formats, ops
from worker.kernels.dispatch import implementation
from worker.kernels.formats import BLOCK, SCALED_FORMATS, kind_of_scale

GRANULARITIES = ("tensor", "row", "block")
BLOCKS = ((1, BLOCK), (BLOCK, BLOCK))
SIDES = ("rows", "columns", "both")


class QuantizedMatrix(NamedTuple):
    """rows: (codes (M, N), dequant_scale) of a matrix. columns: the same of the transposed matrix. amax: of all of it."""

    rows: tuple[Tensor, Tensor] | None
    columns: tuple[Tensor, Tensor] | None
    amax: Tensor | None


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
    _check_scaled_dtype(dtype)
    x, kind = x.detach(), _checked_kind(x, granularity, block)
    if previous_dequant_scale is None:
        return ops.quantize(x, dtype, kind, margin, amax)
    amax = ops.compute_amax(x, kind) if amax is None else amax
    dequant_scale = dequant_scale_from_amax(amax, dtype, margin, previous_dequant_scale)
    return ops.encode(x, dequant_scale, dtype), dequant_scale


def quantize_operand(
    x_MN: Tensor,
    dtype: torch.dtype,
    granularity: str = "tensor",
    *,
    block: tuple[int, int] = (1, BLOCK),
    margin: int = 0,
    sides: str = "rows",
    window: tuple[Tensor, Tensor | None] | None = None,
) -> QuantizedMatrix:
    """x (M, N), a matrix, quantised for products over its "rows", over its "columns", or "both", from one read of x.

    Codes are contiguous and scales laid out as a GEMM takes them.
    window: (an amax (), whether to scale by it, a bool ()), for a tensor scale from past amaxes: until it is to be used the
    scale comes from x's own amax, which is returned. With None for the bool it is scaled by, and x is not looked through.
    """
    _check_scaled_dtype(dtype)
    if x_MN.ndim != 2:
        raise ValueError(f"an operand of a product is a matrix; x has shape {tuple(x_MN.shape)}. Reshape it to (M, N).")
    kind = _checked_kind(x_MN, granularity, block)
    if sides not in SIDES:
        raise ValueError(f"sides is {sides!r}; allowed: {', '.join(SIDES)}.")
    if window is not None and kind != "tensor":
        raise ValueError(f'a window holds amaxes of tensors; granularity is {granularity!r}. Use "tensor", or no window.')
    given = [] if window is None else [part for part in window if part is not None]
    parts = ops.quantize_operand(x_MN.detach(), dtype, kind, margin, sides, given)
    rows = (parts[0], parts[1]) if sides != "columns" else None
    first = 2 if sides == "both" else 0
    columns = (parts[first], parts[first + 1]) if sides != "rows" else None
    returns_amax = window is not None and window[1] is not None
    return QuantizedMatrix(rows, columns, parts[-1] if returns_amax else None)


def compute_amax(x: Tensor, granularity: str = "tensor", block: tuple[int, int] = (1, BLOCK)) -> Tensor:
    """Largest magnitude per scale in fp32, on x's device; non-finite where the group has a non-finite element."""
    return ops.compute_amax(x.detach(), _checked_kind(x, granularity, block))


def dequant_scale_from_amax(amax: Tensor, dtype: torch.dtype, margin: int = 0, previous: Tensor | None = None) -> Tensor:
    """The power-of-two fp32 dequant_scale for each amax (NUMERICS.md, section 3); see formats.py."""
    _check_scaled_dtype(dtype)
    return formats.dequant_scale_from_amax(amax.detach(), dtype, margin, previous)


def encode(x: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of x at a given dequant_scale, e.g. one from past amaxes: nearest even, saturating, NaN for non-finite."""
    _check_scaled_dtype(dtype)
    kind_of_scale(dequant_scale, x.shape)
    return ops.encode(x.detach(), dequant_scale, dtype)


def dequantize(codes: Tensor, dequant_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes × dequant_scale in dtype, rounded once. The granularity follows from the shape of dequant_scale."""
    _check_scaled_dtype(codes.dtype)
    kind_of_scale(dequant_scale, codes.shape)
    return ops.dequantize(codes, dequant_scale, dtype)


def split_dequantize(codes: Tensor, residual: Tensor, dequant_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M3 codes, refined by an int8 residual as of split_encode, × dequant_scale () in dtype, rounded once."""
    return ops.split_dequantize(codes.contiguous(), residual.contiguous(), dequant_scale, dtype)


def all_finite(x: Tensor) -> Tensor:
    """Whether no element of a tensor, or of codes, is NaN or Inf: a 0-dim bool on x's device, no host sync."""
    return ops.all_finite(x.detach())


def sqrt(x: Tensor) -> Tensor:
    """The root of an fp32 tensor, correctly rounded, as IEEE arithmetic has it, so the same on every device."""
    return implementation(x.device).sqrt(x)


def _checked_kind(x: Tensor, granularity: str, block: tuple[int, int]) -> str:
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity is {granularity!r}; allowed: {', '.join(GRANULARITIES)}.")
    if block not in BLOCKS:
        raise ValueError(f"block is {block}; allowed: (1, 128) for activations and gradients, (128, 128) for weights.")
    if x.ndim == 0 and granularity != "tensor":
        raise ValueError(f'granularity {granularity!r} needs at least one dimension; x has none. Use "tensor".')
    return f"block {block[0]}x{block[1]}" if granularity == "block" else granularity


def _check_scaled_dtype(dtype: torch.dtype) -> None:
    if dtype not in SCALED_FORMATS:
        allowed = ", ".join(str(known) for known in SCALED_FORMATS)
        raise ValueError(f"codes cannot have dtype {dtype}; allowed: {allowed}. Other dtypes are stored without a scale.")
