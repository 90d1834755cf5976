"""Quantize and dequantize tensors of any shape, and the steps of both: check, op and fake of each."""

import torch
from torch import Tensor, float32

from octet.worker.kernels import formats
from octet.worker.kernels.formats import SCALED_FORMATS
from octet.worker.kernels.library import define
from octet.worker.kernels.sampling import NUM_MEASURES
from octet.worker.kernels.scales import ScaledCodes, ScaleKind, check_scale, kind_of_scale, scale_kind, scale_shape


def _fake_amax(x: Tensor, kind: ScaleKind) -> Tensor:
    return x.new_empty(scale_shape(x.shape, kind), dtype=torch.float32)


def _fake_quantize(x: Tensor, dtype: torch.dtype, kind: ScaleKind, margin: int, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(scale_shape(x.shape, kind), dtype=torch.float32)


def _fake_encode(x: Tensor, dequant_scale: Tensor, kind: ScaleKind, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _fake_dequantize(quantized: ScaledCodes, dtype: torch.dtype) -> Tensor:
    return quantized.codes.new_empty(quantized.codes.shape, dtype=dtype)


def _fake_split(codes: Tensor, residual: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


_amax_op = define("compute_amax(Tensor x, Kind kind) -> Tensor", _fake_amax)
_quantize_op = define(
    "quantize(Tensor x, ScalarType dtype, Kind kind, int margin, Tensor? amax) -> (Tensor, Tensor)", _fake_quantize
)
_encode_op = define("encode(Tensor x, Tensor dequant_scale, Kind kind, ScalarType dtype) -> Tensor", _fake_encode)
_dequantize_op = define("dequantize(ScaledCodes quantized, ScalarType dtype) -> Tensor", _fake_dequantize)
_split_op = define(
    "split_dequantize(Tensor codes, Tensor residual, Tensor dequant_scale, ScalarType dtype) -> Tensor", _fake_split
)


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    granularity: str = "tensor",
    *,
    margin: int = 0,
    amax: Tensor | None = None,
    block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(codes, dequant_scale) of x, any shape and strides, in float8_e4m3fn, float8_e5m2 or float16.

    granularity: one scale for the tensor, for each row (last dimension), or for each block. block: its rows and columns, by
    default those for activations. amax: use this instead of x's own, e.g. one reduced over ranks; shaped like compute_amax's
    result.
    A non-finite element becomes a NaN code, and makes its group's amax non-finite: see compute_amax and all_finite.
    """
    check_scaled_dtype(dtype)
    kind = _checked_kind(x, granularity, block)
    if amax is not None:
        check_scale(amax, x.shape, kind, "amax")
    codes, dequant_scale = _quantize_op(x.detach(), dtype, kind, margin, amax)
    return codes, dequant_scale


def compute_amax(x: Tensor, granularity: str = "tensor", block: tuple[int, int] | None = None) -> Tensor:
    """Largest magnitude per scale in fp32, on x's device; non-finite where the group has a non-finite element."""
    amax: Tensor = _amax_op(x.detach(), _checked_kind(x, granularity, block))
    return amax


def dequant_scale_from_amax(amax: Tensor, dtype: torch.dtype, margin: int = 0, previous: Tensor | None = None) -> Tensor:
    """The power-of-two fp32 dequant_scale for each amax (NUMERICS.md, section 3); see formats.py."""
    check_scaled_dtype(dtype)
    return formats.dequant_scale_from_amax(amax.detach(), dtype, margin, previous)


def encode(x: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of x at a given dequant_scale, e.g. one from past amaxes: nearest even, saturating, NaN for non-finite.

    The granularity follows from the shape of dequant_scale.
    """
    check_scaled_dtype(dtype)
    codes: Tensor = _encode_op(x.detach(), dequant_scale, kind_of_scale(dequant_scale, x.shape), dtype)
    return codes


def dequantize(codes: Tensor, dequant_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes × dequant_scale in dtype, rounded once. The granularity follows from the shape of dequant_scale."""
    return values_of(ScaledCodes(codes, dequant_scale, kind_of_scale(dequant_scale, codes.shape)), dtype)


def values_of(quantized: ScaledCodes, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes × dequant_scale in dtype, rounded once, of codes that know their kind."""
    check_scaled_dtype(quantized.codes.dtype)
    values: Tensor = _dequantize_op(quantized, dtype)
    return values


def split_dequantize(codes: Tensor, residual: Tensor, dequant_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M3 codes, refined by an int8 residual as of split_encode, × dequant_scale () in dtype, rounded once."""
    values: Tensor = _split_op(codes.contiguous(), residual.contiguous(), dequant_scale, dtype)
    return values


def check_scaled_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError for a dtype that is stored without a scale."""
    if dtype not in SCALED_FORMATS:
        allowed = ", ".join(str(known) for known in SCALED_FORMATS)
        raise ValueError(f"codes cannot have dtype {dtype}; allowed: {allowed}. Other dtypes are stored without a scale.")


def _checked_kind(x: Tensor, granularity: str, block: tuple[int, int] | None) -> ScaleKind:
    kind = scale_kind(granularity, block)
    if x.ndim == 0 and kind is not ScaleKind.TENSOR:
        raise ValueError(f'granularity {granularity!r} needs at least one dimension; x has none. Use "tensor".')
    return kind


_measure_op = define(
    "measure(Tensor x, ScaledCodes quantized, Tensor? stored_scale, Tensor(a!) out) -> ()", fake=lambda *_arguments: None
)


def measure(x_MN: Tensor, quantized: ScaledCodes, stored_scale: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Five numbers, fp32 (5,), of `sampling.sampled_rows` of a matrix x on its device, or of x * stored_scale.

    They are the amax; the largest dequant_scale; the share of elements clamped to the format's maximum; the share of elements
    that are not zero and whose codes are; 10·log10 of signal to quantization noise, 200 where nothing was rounded and NaN where
    an element of x or of the codes is not finite.
    quantized: x in codes. stored_scale: (), a power of two. out: where to write them. Where x has no element, all five are NaN.
    """
    measured = x_MN.new_empty(NUM_MEASURES, dtype=float32) if out is None else out
    _measure_op(x_MN.detach(), quantized, stored_scale, measured)
    return measured
