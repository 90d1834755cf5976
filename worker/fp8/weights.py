"""Encode a weight in the format that a level's row names."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from octet.api_schemas.levels import Level
from octet.worker import kernels
from octet.worker.common.deferred import deferred, is_deferred
from octet.worker.fp8.recipe import E4M3
from octet.worker.kernels.rounding import NUM_BITS

PIECE_ELEMENTS = 1 << 22
"""Elements that are encoded or decoded at a time, so that temporaries do not grow with the weight."""


class EncodedWeight(NamedTuple):
    """`value = codes * dequant_scale`; an INT8 residual, if there is one, refines the codes. amax: of the values, ()."""

    codes: Tensor
    dequant_scale: Tensor
    amax: Tensor
    residual: Tensor | None = None


def encode_weight(values: Tensor, level: Level, dequant_scale: Tensor | None = None) -> EncodedWeight | None:
    """Return the weight in the format of the level, rounded to nearest; None where it stays as it is.

    dequant_scale: at which the values are E4M3 codes already, which a level of such codes then holds.

    For values without memory it returns codes and a residual without memory, and a scale and an
    amax of 0, to be filled in together.
    """
    if level.weight == "fp32":
        return None
    dtype, has_residual = torch.float16 if level.weight == "fp16+scale" else E4M3, level.master_weight == "int8-residual"
    if is_deferred(values):
        shape, device = tuple(values.shape), values.device
        residual = deferred(shape, torch.int8, device) if has_residual else None
        return EncodedWeight(
            deferred(shape, dtype, device), torch.zeros((), device=device), torch.zeros((), device=device), residual
        )
    known = dequant_scale if dtype == E4M3 else None
    return encode_values(values, dtype, has_residual=has_residual, dequant_scale=known)


def amax_of(values: Tensor) -> Tensor:
    """Return the largest magnitude of a weight's values, fp32 (). Its temporaries have PIECE_ELEMENTS elements."""
    return torch.stack([kernels.compute_amax(piece.float()) for (piece,) in in_pieces(values.detach().contiguous())]).amax()


def encode_values(
    values: Tensor,
    dtype: torch.dtype,
    *,
    has_residual: bool = False,
    amax: Tensor | None = None,
    dequant_scale: Tensor | None = None,
) -> EncodedWeight:
    """Return codes of FP16 or E4M3 with one scale, rounded to nearest.

    has_residual: E4M3 codes are refined by an INT8 residual. amax: of the whole weight, if the
    values are only a part of it. dequant_scale: by default that of the amax.

    Apart from the result this takes the memory of temporaries of
    PIECE_ELEMENTS elements, and of a copy of values that are not contiguous.
    """
    values = values.detach().contiguous()
    amax = amax_of(values) if amax is None else amax
    codes = torch.empty(values.shape, dtype=dtype, device=values.device)
    if dequant_scale is None:
        dequant_scale = kernels.dequant_scale_from_amax(amax, dtype)
    if not has_residual:
        for piece, place in in_pieces(values, codes):
            place.copy_(kernels.encode(piece.float(), dequant_scale, dtype))
        return EncodedWeight(codes, dequant_scale, amax)
    residual = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    for piece, *places in in_pieces(values, codes, residual):
        halves = torch.full_like(piece, 1 << (NUM_BITS - 1), dtype=torch.int32)  # half of a draw rounds to nearest
        for place, encoded in zip(places, kernels.split_encode(piece.float() / dequant_scale, halves), strict=True):
            place.copy_(encoded)
    return EncodedWeight(codes, dequant_scale, amax, residual)


def decode_values(codes: Tensor, dequant_scale: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the values of codes with one scale (), rounded once to dtype. residual: INT8, refines E4M3 codes.

    Apart from the result this takes the memory of temporaries of PIECE_ELEMENTS elements. A kernel
    that decodes the whole at once is faster on a GPU.
    """
    held = (codes,) if residual is None else (codes, residual)
    if codes.numel() <= PIECE_ELEMENTS:
        return _decode_piece(*(tensor.contiguous() for tensor in held), dequant_scale=dequant_scale, dtype=dtype)
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for place, *piece in in_pieces(values, *held):
        place.copy_(_decode_piece(*piece, dequant_scale=dequant_scale, dtype=dtype))
    return values


def _decode_piece(codes: Tensor, residual: Tensor | None = None, *, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    if residual is None:
        return kernels.dequantize(codes, dequant_scale, dtype)
    return kernels.split_dequantize(codes, residual, dequant_scale, dtype)


def in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of at most PIECE_ELEMENTS consecutive elements of tensors of one shape, which are contiguous."""
    return zip(*(tensor.reshape(-1).split(PIECE_ELEMENTS) for tensor in tensors), strict=True)
