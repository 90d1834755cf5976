"""Weights of codes that belong to no layer, as tests of the optimizer need them."""

from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.fp8.weight import Float8Weight
from octet.worker.fp8.weights import decode_values

KINDS = ("fp16", "split", "master")
"""FP16 codes; E4M3 codes with a residual; E4M3 codes, with a master weight in the optimizer."""


def stored_weight(values: Tensor, kind: str) -> Float8Weight:
    """Return a parameter of values rounded to nearest. kind: of `KINDS`; a master starts from the values themselves."""
    dtype = torch.float16 if kind == "fp16" else torch.float8_e4m3fn
    weight = Float8Weight.encode(values, dtype, has_residual=kind == "split")
    if kind == "master":
        weight.state.wide, weight.state.is_assigned = values, True
    parameter: Any = nn.Parameter(weight)
    assert type(parameter) is Float8Weight
    return parameter


def values_of_codes(weight: Float8Weight) -> Tensor:
    """Return the fp32 values of codes and residual, which are rounder than those of a master."""
    return decode_values(weight.codes, weight.dequant_scale, weight.residual, torch.float32)


def parts_of(weight: Float8Weight) -> list[Tensor]:
    """Return a weight's codes, scale, amax and residual, where it has one."""
    parts = (weight.codes, weight.dequant_scale, weight.values_amax, weight.residual)
    return [part for part in parts if part is not None]
