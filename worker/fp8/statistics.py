"""Describe how well FP8 holds an operand, in a step that samples it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OperandSample:
    """One operand of one layer in one optimizer step: a sample of its rows, all where it has at most 131,072 elements.

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
