"""Read gradients for the optimizer without a wide copy of FP8 codes: fp32 values by the run, and whether all are finite."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.kernels.torch_private import local_of


class GradientReader:
    """A gradient, flattened: plain fp32, bf16 or fp16, or FP8 codes with one scale ()."""

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
        return kernels.dequantize(run, self.dequant_scale)


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient of what a parameter holds here; of a shard, that of the same rows."""
    gradient: Any = parameter.grad
    assert gradient is not None
    local = local_of(gradient)
    if local is not gradient and gradient.placements != parameter.placements:
        return local_of(gradient.redistribute(placements=parameter.placements))
    return local


def _stacked(numbers: Sequence[Tensor]) -> Tensor:
    """The numbers on the first one's device."""
    device = numbers[0].device
    return torch.stack([number if number.device == device else number.to(device) for number in numbers])


def all_finite(gradients: Iterable[Tensor]) -> Tensor:
    """Return a 0-dim bool on the first gradient's device: True if every element of every gradient is finite.

    The host does not wait. FP8 gradients: read only the scales (NaN marks non-finite). Others: read
    the values, in two launches on a CUDA device.
    """
    scales, wide = [], []
    for gradient in gradients:
        if type(gradient) is Float8Gradient:
            scales.append(gradient.dequant_scale)
        elif gradient.is_cuda and not gradient.is_sparse:
            wide.append(gradient)
        else:
            wide.append(GradientReader(gradient).flat)
    flags = []
    if scales:
        flags.append(_stacked(scales).isfinite().all())
    if wide and wide[0].is_cuda:
        by_device: dict[torch.device, list[Tensor]] = {}
        for gradient in wide:
            by_device.setdefault(gradient.device, []).append(gradient)
        flags += [kernels.total_norm(alike, alike, torch.inf).isfinite() for alike in by_device.values()]
    else:
        flags += [kernels.all_finite(gradient) for gradient in wide]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).all() if flags else torch.ones((), dtype=torch.bool)
