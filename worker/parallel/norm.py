"""The norm of gradients that ranks hold in parts, and clipping by it."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from worker.fp8.gradient import Float8Gradient
from worker.mesh import Axis


@torch.no_grad()
def clip_together(gradients: Mapping[Tensor, Tensor], max_norm: float, counts: Callable[[Tensor], bool], axis: Axis) -> Tensor:
    """Scale gradients so that their norm over the axis is at most max_norm. Returns the norm before, fp32 ().

    gradients: this rank's, by parameter of the model. counts: whether this rank's copy of a parameter counts; of one that is
    the same on several ranks, one does. Squares are summed in float64, so that the norm hardly depends on how gradients are
    divided.
    """
    squares = torch.zeros((), dtype=torch.float64, device=axis.device)
    for parameter, gradient in gradients.items():
        if counts(parameter):
            squares += squared_norm(gradient)
    norm = axis.sum_(squares).sqrt().float()
    for gradient in gradients.values():
        gradient.mul_(clip_factor(norm, max_norm))
    return norm


def squared_norm(gradient: Tensor) -> Tensor:
    """The sum of squares, float64 ()."""
    values = gradient.dequantize() if isinstance(gradient, Float8Gradient) else gradient
    return torch.linalg.vector_norm(values, dtype=torch.float64).square()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this norm are multiplied by: at most 1; torch's formula."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
