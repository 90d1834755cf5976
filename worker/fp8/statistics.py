"""Measure how well FP8 holds a tensor, where it is quantized; the numbers are read later, so that no device is waited for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker import kernels
from worker.kernels import ScaledCodes, ScaleKind
from worker.kernels.formats import BLOCK, SCALED_FORMATS
from worker.kernels.library import define_composite

NUM_MEASURES = 5
CHUNK_ELEMENTS = 1 << 20
MOST_DECIBELS = 200.0
"""Reported where nothing was rounded."""


@dataclass(frozen=True)
class OperandSample:
    """One operand of one layer in one optimizer step.

    overflow_ratio: share of elements clamped to the format's maximum. underflow_ratio: share of non-zero elements that
    became zero. sqnr_db: signal to quantization noise; 31.5 dB for E4M3 and 25.5 dB for E5M2 where nothing is out of range.
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


def measure(x: Tensor, quantized: ScaledCodes, unit: Tensor | None = None) -> Tensor:
    """The five numbers of an `OperandSample` of a matrix x, or of x * unit, as an fp32 tensor (5,) on x's device.

    quantized: x in codes. Where x has no element, all five are NaN. Rows are taken a few at a time: a sample costs a fixed
    amount of memory, whatever the size of the operand.
    """
    measured: Tensor = _measure_op(x, quantized, unit)
    return measured


def _measure(x: Tensor, quantized: ScaledCodes, unit: Tensor | None) -> Tensor:
    if x.numel() == 0:
        return torch.full((NUM_MEASURES,), torch.nan, device=x.device)
    largest = SCALED_FORMATS[quantized.codes.dtype].max
    sums = torch.zeros(4, dtype=torch.float64, device=x.device)
    amax, one = torch.zeros((), device=x.device), torch.ones((), device=x.device)
    num_rows = max(1, CHUNK_ELEMENTS // (x.shape[1] * BLOCK)) * BLOCK
    for start in range(0, x.shape[0], num_rows):
        rows = quantized.rows(start, start + num_rows)
        values = kernels.values_of(rows)
        stored = kernels.values_of(ScaledCodes(rows.codes, one, ScaleKind.TENSOR)).abs()
        wide = x[start : start + num_rows].float()
        magnitude = wide.abs()
        amax = torch.maximum(amax, magnitude.amax())
        is_clamped = (stored == largest) & (magnitude > values.abs())
        counts = (is_clamped, (stored == 0) & (magnitude > 0), wide.square(), (wide - values).square())
        sums += torch.stack([count.sum(dtype=torch.float64) for count in counts])
    num_clamped, num_lost, signal, noise = sums.float()
    factor = 1.0 if unit is None else unit
    decibels = torch.where(noise > 0, 10 * torch.log10(signal / noise), MOST_DECIBELS)
    largest_scale = quantized.dequant_scale.amax() * factor
    return torch.stack((amax * factor, largest_scale, num_clamped / x.numel(), num_lost / x.numel(), decibels))


_measure_op = define_composite(  # one node of a compiled graph and not a loop
    "measure(Tensor x, ScaledCodes quantized, Tensor? unit) -> Tensor",
    _measure,
    fake=lambda x, quantized, unit: x.new_empty(NUM_MEASURES, dtype=torch.float32),
)
