"""The numbers on which ranks that train one model agree in each step, so that they all hold the same codes.

Before the optimizer's step: the amaxes of operands, which become the largest of all ranks that hold the same layers (as in
Transformer Engine's `reduce_amax`), sampled statistics, which decide on demotions and become their mean, and whether all
gradients are finite. After it: one scale for each weight that several ranks have stepped.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from octet.worker.fp8.operand import OperandScaling
from octet.worker.mesh import Axis
from octet.worker.optim import LowBitOptimizer, QuantizedWeight


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


def agree_on_finite(axis: Axis, finite: Tensor) -> Tensor:
    """Return whether the gradients of all ranks of the axis are finite. finite: those of this rank, bool ()."""
    return axis.max_((~finite).to(axis.device, torch.float32)) == 0


def agree_on_weight_scales(
    optimizer: LowBitOptimizer, weights: Sequence[QuantizedWeight], is_owned: Tensor | None, axis: Axis
) -> None:
    """Give each weight the largest amax and scale of the axis; NaN where one is not finite. All ranks call it together.

    is_owned: bool (weights), True for a weight if this rank has stepped some of its elements; None
    for all weights.
    """
    if not weights:
        return
    written = torch.stack([torch.stack([weight.amax.reshape(()), weight.dequant_scale.reshape(())]) for weight in weights])
    if is_owned is not None:
        written = torch.where(is_owned[:, None], written, 0.0)
    amaxes, scales = axis.max_(written).unbind(1)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    for weight, amax, dequant_scale in zip(weights, amaxes, scales, strict=True):
        weight.amax.copy_(amax)
        weight.dequant_scale.copy_(dequant_scale)
        if weight.needs_master:
            master_scale = optimizer.state[weight.parameter]["master_weights"]["dequant_scale"]
            master_scale.copy_(torch.where(dequant_scale.isfinite(), master_scale, torch.nan))


def _reduce(tensors: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> None:
    """Reduce many small tensors as one tensor, in place."""
    reduced = reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    for tensor, part in zip(tensors, reduced.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
