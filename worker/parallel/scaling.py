"""What FP8 scaling remembers must be the same on every rank: histories are part of a checkpoint that all of them load.

Once per step, before the optimizer's: the step's amaxes become the largest of any rank that holds the same layers (as
Transformer Engine's `reduce_amax`), and sampled statistics, by which layers are demoted, become their mean.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from worker.fp8.operand import OperandScaling
from worker.mesh import Axis


def share_scaling(model: nn.Module, stage: Axis) -> None:
    """Agree on amaxes and samples. All ranks quantize and sample the same operands in the same steps."""
    if stage.size == 1:
        return
    scalings = [module for module in model.modules() if isinstance(module, OperandScaling)]
    amaxes = [scaling.step_amax for scaling in scalings if scaling.recipe.amax_history_length]
    if amaxes:
        _share(amaxes, stage.max_)  # an infinity restarts a history just as NaN does
    samples = [scaling.sample for scaling in scalings if scaling.is_sampled]
    if samples:
        _share(samples, lambda flat: stage.sum_(flat) / stage.size)


def _share(tensors: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> None:
    """Reduce many small tensors as one, in place."""
    reduced = reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    for tensor, part in zip(tensors, reduced.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
