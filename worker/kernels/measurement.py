"""Measure how well codes hold a matrix, on a sample of its rows: check, op and fake."""

from torch import Tensor, float32

from octet.worker.kernels.library import define
from octet.worker.kernels.sampling import NUM_MEASURES
from octet.worker.kernels.scales import ScaledCodes

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
