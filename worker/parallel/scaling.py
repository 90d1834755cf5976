"""Keeps the state of FP8 scaling equal on all ranks. Histories are part of a checkpoint that every rank loads.

Once per step, before the optimizer step, each amax becomes the largest of all ranks that hold the same layers (as in
Transformer Engine's `reduce_amax`), and sampled statistics, which decide on demotions, become their mean.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from worker.fp8.operand import OperandScaling
from worker.mesh import Axis


def share_scaling(model: nn.Module, stage: Axis) -> None:
    """Share amaxes and samples over the axis. All ranks quantize and sample the same operands in the same steps."""
    if stage.size == 1:
        return
    scalings = [module for module in model.modules() if isinstance(module, OperandScaling)]
    amaxes = [scaling.step_amax for scaling in scalings if scaling.recipe.amax_history_length]
    if amaxes:
        _share(amaxes, stage.max_)  # an infinity restarts a history as NaN does
    samples = [scaling.sample for scaling in scalings if scaling.is_sampled]
    if samples:
        _share(samples, lambda flat: stage.sum_(flat) / stage.size)


def _share(tensors: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> None:
    """Reduce many small tensors as one tensor, in place."""
    reduced = reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    for tensor, part in zip(tensors, reduced.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
