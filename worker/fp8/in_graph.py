"""What a compiled graph learns of a tensor where it is written: ops of torch, which the compiler joins to the writing kernel.

An amax is found in two steps, of each row and then of all rows. The compiler computes the first with the tensor, whoever makes
it: a norm with the addition before it, a gate, the sum of two gradients. What one of our ops has made is read once, as our own
kernel would read it. With delayed scaling the codes are computed there too, and `complete` finishes them. What is computed is
that of the tensor as it is written, not of the wider values that the compiler holds: the largest of rounded values is the
largest value, rounded, and codes are made of values that are rounded again. Eagerly modules tell each other instead
(`carried.py`, `gradient_notes.py`).
"""

import torch
from torch import Tensor

from worker.kernels import ACTIVATIONS, Ahead
from worker.kernels.formats import SCALED_FORMATS, dequant_scale_from_amax


def amax_in_graph(x_MN: Tensor, activation: str | None = None) -> Tensor | None:
    """The largest magnitude of a matrix, fp32 (), as `kernels.compute_amax` finds it; None outside of compiled graphs.

    activation: of kernels' ACTIVATIONS, of which it is the amax. It may be a unit in the last place beside that of the values
    that our kernel makes, whose exp is another. Scales are powers of two, so only a value at such a boundary could tell.
    """
    if not torch.compiler.is_compiling() or not x_MN.numel():
        return None
    values = x_MN.detach() if activation is None else ACTIVATIONS[activation].forward(x_MN.detach())
    return values.abs().amax(-1).amax().float()


def codes_in_graph(x_MN: Tensor, ahead: Ahead) -> Tensor:
    """Codes of a matrix in fp32 or bf16 at the scale of `ahead`, for `kernels.complete`."""
    values = x_MN.detach().float()
    if x_MN.dtype == torch.bfloat16:  # what the compiler holds of it is fp32, and a cast to bf16 and back is nothing to it
        bits = values.view(torch.int32)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000).view(torch.float32)
        values = torch.where(values.isfinite(), rounded, torch.nan)
    limit = SCALED_FORMATS[ahead.dtype].max
    quant_scale = dequant_scale_from_amax(ahead.amax, ahead.dtype, ahead.margin).reciprocal()
    scaled = torch.where(values.isfinite(), values, torch.nan) * quant_scale
    return scaled.clamp(-limit, limit).to(ahead.dtype)
