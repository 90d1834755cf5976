"""The numbers on which ranks that train one model agree in each step, so that they all hold the same codes.

Before the optimizer's step: the amaxes of operands, which become the largest of all ranks that hold the same layers (as in
Transformer Engine's `reduce_amax`), and sampled statistics, which decide on demotions and become their mean. What they agree
on about weights and gradients is in `optim/shards.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from octet.worker.fp8.operand import OperandScaling
from octet.worker.mesh import Axis


def agree_on_amaxes(model: nn.Module, stage: Axis) -> None:
    """Share amaxes and samples over the axis. All ranks quantize and sample the same operands in the same steps."""
    if stage.size == 1:
        return
    scalings = [module for module in model.modules() if isinstance(module, OperandScaling)]
    amaxes = [scaling.step_amax for scaling in scalings if scaling.recipe.amax_history_length]
    if amaxes:
        _reduce(amaxes, stage.max_)  # an infinity restarts a history as NaN does
    samples = [scaling.sample for scaling in scalings if scaling.is_sampled]
    if samples:
        _reduce(samples, lambda flat: stage.sum_(flat) / stage.size)


def _reduce(tensors: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> None:
    """Reduce many small tensors as one tensor, in place."""
    reduced = reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    for tensor, part in zip(tensors, reduced.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
