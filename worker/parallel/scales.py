"""What ranks that hold parts of one model agree on: one scale for each weight, and whether to take a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.mesh import Axis
from worker.optim import LowBitOptimizer, QuantizedWeight


def agree_on_scales(
    optimizer: LowBitOptimizer, weights: Sequence[QuantizedWeight], is_owned: Tensor | None, axis: Axis
) -> None:
    """Give each weight the largest amax and scale of the axis; NaN where one is not finite. All ranks call it together.

    is_owned: of which weights this rank has stepped some elements, bool (weights); None for all.
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
            master_scale = optimizer.state[weight.codes]["master_weights"]["dequant_scale"]
            master_scale.copy_(torch.where(dequant_scale.isfinite(), master_scale, torch.nan))


def all_finite_on(axis: Axis, finite: Tensor) -> Tensor:
    """Tell whether the gradients of all ranks of the axis are finite. finite: those of this rank, bool ()."""
    return axis.max_((~finite).to(axis.device, torch.float32)) == 0
