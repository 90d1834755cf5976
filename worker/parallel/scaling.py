"""What FP8 scaling remembers must be the same on every rank: histories are part of a checkpoint that all of them load.

Once per step, before the optimizer's: the step's amaxes become the largest of any rank (as Transformer Engine's
`reduce_amax`), and sampled statistics, by which layers are demoted, their mean over the ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worker.fp8.operand import OperandScaling
from worker.parallel.ranks import Ranks


def share_scaling(model: nn.Module, ranks: Ranks) -> None:
    """Agree on amaxes and samples. All ranks quantise and sample the same operands in the same steps."""
    if ranks.world_size == 1:
        return
    scalings = [module for module in model.modules() if isinstance(module, OperandScaling)]
    amaxes = [scaling.step_amax for scaling in scalings if scaling.recipe.amax_history_length]
    if amaxes:
        # MAX over NaN is not defined; infinity restarts a history just as NaN does.
        _share(amaxes, lambda flat: ranks.all_reduce_max(flat.nan_to_num_(nan=torch.inf, posinf=torch.inf)))
    samples = [scaling.sample for scaling in scalings if scaling.is_sampled]
    if samples:
        _share(samples, lambda flat: _mean(flat, ranks))


def _share(tensors: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> None:
    """Reduce many small tensors as one, in place."""
    reduced = reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    for tensor, part in zip(tensors, reduced.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _mean(flat: Tensor, ranks: Ranks) -> Tensor:
    dist.all_reduce(flat)
    return flat / ranks.world_size
