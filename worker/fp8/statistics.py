"""How well FP8 holds a tensor: measured where the tensor is quantised, read later, so that no device is waited for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker import kernels
from worker.kernels.formats import BLOCK, SCALED_FORMATS

NUM_MEASURES = 5
CHUNK_ELEMENTS = 1 << 20
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


@torch.library.custom_op("octet::measure", mutates_args=())
def measure(x: Tensor, codes: Tensor, dequant_scale: Tensor, unit: Tensor | None = None) -> Tensor:
    """The five numbers of an `OperandSample` of a matrix x, or of x * unit, as an fp32 tensor (5,) on x's device.

    Rows are taken a few at a time: a sample costs a fixed amount of memory, whatever the size of the operand. An op, so
    that a compiled graph holds one node and not a loop.
    """
    largest = SCALED_FORMATS[codes.dtype].max
    sums = torch.zeros(4, dtype=torch.float64, device=x.device)
    amax, one = torch.zeros((), device=x.device), torch.ones((), device=x.device)
    num_rows = max(1, CHUNK_ELEMENTS // (x.shape[1] * BLOCK)) * BLOCK
    for start in range(0, x.shape[0], num_rows):
        rows = slice(start, start + num_rows)
        values = kernels.dequantize(codes[rows], _scales_of(dequant_scale, x.shape[0], rows))
        stored, wide = kernels.dequantize(codes[rows], one).abs(), x[rows].float()
        magnitude = wide.abs()
        amax = torch.maximum(amax, magnitude.amax())
        is_clamped = (stored == largest) & (magnitude > values.abs())
        counts = (is_clamped, (stored == 0) & (magnitude > 0), wide.square(), (wide - values).square())
        sums += torch.stack([count.sum(dtype=torch.float64) for count in counts])
    num_clamped, num_lost, signal, noise = sums.float()
    factor = 1.0 if unit is None else unit
    decibels = torch.where(noise > 0, 10 * torch.log10(signal / noise), MOST_DECIBELS)
    return torch.stack((amax * factor, dequant_scale.amax() * factor, num_clamped / x.numel(), num_lost / x.numel(), decibels))


@measure.register_fake
def _measure_fake(x: Tensor, codes: Tensor, dequant_scale: Tensor, unit: Tensor | None = None) -> Tensor:
    return x.new_empty(NUM_MEASURES, dtype=torch.float32)


def _scales_of(dequant_scale: Tensor, num_rows: int, rows: slice) -> Tensor:
    """Those of some rows, which start at a multiple of 128."""
    if dequant_scale.ndim == 0:
        return dequant_scale
    if dequant_scale.shape[0] == num_rows:
        return dequant_scale[rows]
    return dequant_scale[rows.start // BLOCK : -(-rows.stop // BLOCK)]  # square blocks
