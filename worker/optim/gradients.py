"""What the optimizer sees of a gradient: fp32 values by the run, and whether it is finite, without a wide copy of FP8 codes."""

from collections.abc import Iterable

import torch
from torch import Tensor

from worker import kernels
from worker.fp8.gradient import Float8Gradient
from worker.kernels.formats import BLOCK


class GradientReader:
    """A gradient, flattened: plain fp32, bf16 or fp16, or FP8 codes with one scale or one for each 128 elements."""

    def __init__(self, gradient: Tensor) -> None:
        if gradient.is_sparse:
            raise ValueError("the gradient is sparse; allowed: dense. Construct the embedding with sparse=False.")
        self.dequant_scale: Tensor | None = None
        if isinstance(gradient, Float8Gradient):
            gradient, self.dequant_scale = gradient.codes, gradient.dequant_scale
        self.flat = gradient.detach().reshape(-1)

    def read(self, elements: range) -> Tensor:
        """The fp32 values of a run; may be a view of the gradient."""
        run = self.flat[elements.start : elements.stop]
        if self.dequant_scale is None:
            return run.float()
        if self.dequant_scale.ndim == 0:
            return kernels.dequantize(run, self.dequant_scale)
        return kernels.dequantize(run, self.dequant_scale[elements.start // BLOCK : -(-elements.stop // BLOCK)])

    def is_finite(self) -> Tensor:
        """A 0-dim bool; of an FP8 gradient the scale says it."""
        return kernels.all_finite(self.flat if self.dequant_scale is None else self.dequant_scale)


def all_finite(gradients: Iterable[Tensor]) -> Tensor:
    """Whether every element of every gradient is finite, as a 0-dim bool."""
    flags = [GradientReader(gradient).is_finite() for gradient in gradients]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).all() if flags else torch.ones((), dtype=torch.bool)
