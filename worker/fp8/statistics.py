"""How well FP8 holds a tensor: measured where the tensor is quantised, read later, so that no device is waited for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker import kernels
from worker.kernels.formats import SCALED_FORMATS

MOST_DECIBELS = 200.0
"""Reported where nothing was rounded."""


@dataclass(frozen=True)
class OperandSample:
    """One operand of one layer in one optimizer step.

    overflow_ratio: share of elements clamped to the format's maximum. underflow_ratio: share of non-zero elements that
    became zero. sqnr_db: signal to quantisation noise; 31.5 dB for E4M3 and 25.5 dB for E5M2 where nothing is out of range.
    dequant_scale: the largest, where there are several.
    """

    step: int
    layer: str
    operand: str
    amax: float
    dequant_scale: float
    overflow_ratio: float
    underflow_ratio: float
    sqnr_db: float


def measure(x: Tensor, codes: Tensor, dequant_scale: Tensor, unit: Tensor | None = None) -> Tensor:
    """The five numbers of an `OperandSample` of x, or of x * unit, as an fp32 tensor (5,) on x's device."""
    values = kernels.dequantize(codes, dequant_scale)
    stored = kernels.dequantize(codes, torch.ones_like(dequant_scale)).abs()
    wide, magnitude = x.float(), x.float().abs()
    signal, noise = wide.square().sum(), (wide - values).square().sum()
    is_clamped = (stored == SCALED_FORMATS[codes.dtype].max) & (magnitude > values.abs())
    decibels = torch.where(noise > 0, 10 * torch.log10(signal / noise), MOST_DECIBELS)
    return torch.stack(
        (
            magnitude.amax() * (1.0 if unit is None else unit),
            dequant_scale.amax() * (1.0 if unit is None else unit),
            is_clamped.float().mean(),
            ((stored == 0) & (magnitude > 0)).float().mean(),
            decibels,
        )
    )
