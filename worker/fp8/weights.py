"""Encode a weight as a level's row asks for it."""

from typing import NamedTuple

import torch
from torch import Tensor

from api_schemas.levels import Level
from worker import kernels
from worker.fp8.recipe import E4M3
from worker.kernels.rounding import NUM_BITS


class EncodedWeight(NamedTuple):
    """`value = codes * dequant_scale`; an INT8 residual, if there is one, refines the codes. amax: of the values, ()."""

    codes: Tensor
    dequant_scale: Tensor
    amax: Tensor
    residual: Tensor | None = None


def encode_weight(values: Tensor, level: Level) -> EncodedWeight | None:
    """The weight as the level holds it, rounded to nearest; None where it stays as it is."""
    if level.weight == "fp32":
        return None
    dtype = torch.float16 if level.weight == "fp16+scale" else E4M3
    return encode_values(values, dtype, has_residual=level.master_weight == "int8-residual")


def encode_values(values: Tensor, dtype: torch.dtype, *, has_residual: bool = False) -> EncodedWeight:
    """Codes of FP16 or E4M3 with one scale, rounded to nearest; has_residual: E4M3 codes refined by an INT8 residual."""
    values = values.detach().float()
    amax = kernels.compute_amax(values)
    if not has_residual:
        return EncodedWeight(*kernels.quantize(values, dtype, amax=amax), amax)
    dequant_scale = kernels.dequant_scale_from_amax(amax, E4M3)
    halves = torch.full(values.shape, 1 << (NUM_BITS - 1), dtype=torch.int32, device=values.device)
    codes, residual = kernels.split_encode(values / dequant_scale, halves)  # half of a draw rounds to nearest
    return EncodedWeight(codes, dequant_scale, amax, residual)
