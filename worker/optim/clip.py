"""Clips gradients by their norm: the bits of `torch.nn.utils.clip_grad_norm_` on a CPU, three launches on a device.

torch's function takes gradients in FP8 too, by `_foreach_norm` and `_foreach_mul_`, and makes nine launches: two for the norms,
six on one number, and one that multiplies. The first subclass that torch dispatches also makes it load DTensor and sympy, more
than a second of a rank's start; here codes and scales are read from the gradients, and nothing is dispatched.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.fp8.gradient import codes_of, scales_of


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients, on one device, so that their norm as one vector is at most max_norm.

    Returns the norm before, fp32 (). Gradients in FP8 keep their codes; their scales change.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    if not by_dtype:
        return torch.tensor(0.0)
    gradients = [gradient for group in by_dtype.values() for gradient in group]  # torch adds the squares in this order
    codes, scales = codes_of(gradients), scales_of(gradients)
    norm = kernels.total_norm(codes, scales)
    kernels.clip_(codes, scales, norm, max_norm)
    return norm


def clip_by(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients that are a part of a vector whose norm is known, fp32 (), as if the vector were clipped to max_norm."""
    kernels.clip_(codes_of(gradients), scales_of(gradients), norm, max_norm)
