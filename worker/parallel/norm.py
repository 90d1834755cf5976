"""The norm of gradients that ranks hold in parts, and clipping by it.

On an accelerator two launches read all gradients, codes and values alike, and one multiplies them, however many there are; four
more, and the ranks' sum, are on one number. On a CPU each is read in float64, so that the norm hardly depends on how gradients
are divided.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.fp8.accelerator import is_accelerator
from octet.worker.fp8.gradient import Float8Gradient, codes_of, scales_of
from octet.worker.mesh import Axis


@torch.no_grad()
def clip_together(gradients: Mapping[Tensor, Tensor], max_norm: float, counts: Callable[[Tensor], bool], axis: Axis) -> Tensor:
    """Scale gradients so that their norm over the axis is at most max_norm. Returns the norm before, fp32 ().

    gradients: this rank's, by parameter of the model. counts: whether this rank's copy of a parameter counts; of one that is
    the same on several ranks, one does.
    """
    norm = (
        axis.sum_(_sum_of_squares([gradients[parameter] for parameter in gradients if counts(parameter)], axis)).sqrt().float()
    )
    if gradients:
        held = list(gradients.values())
        kernels.clip_(codes_of(held), scales_of(held), norm, max_norm)
    return norm


def _sum_of_squares(gradients: list[Tensor], axis: Axis) -> Tensor:
    """float64 (), of all gradients."""
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if gradients and is_accelerator(axis.device):
        return kernels.total_norm(codes_of(gradients), scales_of(gradients)).double().square()
    squares = torch.zeros((), dtype=torch.float64, device=axis.device)
    for gradient in gradients:
        squares += squared_norm(gradient)
    return squares


def squared_norm(gradient: Tensor) -> Tensor:
    """The sum of squares, float64 ()."""
    values = gradient.dequantize() if isinstance(gradient, Float8Gradient) else gradient
    return torch.linalg.vector_norm(values, dtype=torch.float64).square()
