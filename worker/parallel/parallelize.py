"""`parallelize`: train a converted model on several ranks in a loop of one's own, in place of torch's DDP or FSDP2.

    dist.init_process_group()
    model, optimizer = initialize(model, optimizer, "O2")
    parallel = parallelize(model, optimizer, zero_stage=1)
    with parallel.no_sync():
        loss(first).backward()
    loss(last).backward()
    parallel.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

Each rank reads its own part of the batch. `Parallel` is also what the trainer of jobs uses.
"""

import math
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worker.mesh import Axis
from worker.optim import LowBitOptimizer, clip_grad_norm_
from worker.parallel.data_parallel import MAX_ELEMENTS, GradientBuckets, broadcast_parameters
from worker.parallel.scaling import share_scaling
from worker.parallel.zero import ShardedStates

ZERO_STAGES = (0, 1)


class Parallel:
    """A model and its optimizer on the ranks of an axis: what happens between the backward pass and the next forward pass."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Axis,
        stage: Axis,
        *,
        zero_stage: int = 0,
        max_elements: int = MAX_ELEMENTS,
    ) -> None:
        """data: ranks that train on different samples. stage: ranks that agree on FP8 scaling. max_elements: of a bucket.

        Raises ValueError for a stage that is not built, and for an optimizer or a parameter that cannot be sharded.
        """
        if zero_stage not in ZERO_STAGES:
            raise ValueError(
                f"zero_stage is {zero_stage}; allowed: {' or '.join(map(str, ZERO_STAGES))}. Stages 2 and 3 are not built; "
                "stage 1 shards optimizer states and master weights."
            )
        self.model, self.optimizer, self.data, self.stage = model, optimizer, data, stage
        self.gradients = GradientBuckets(model, data, max_elements=max_elements)
        self._sharded: ShardedStates | None = None
        if zero_stage and data.size > 1:
            if not isinstance(optimizer, LowBitOptimizer):
                raise ValueError(
                    f"zero_stage is {zero_stage} and the optimizer a {type(optimizer).__name__}; allowed: those of which "
                    "initialize makes its own, AdamW, Adam and Lion. Use one of these, or zero_stage=0."
                )
            self._sharded = ShardedStates(optimizer, self.gradients)

    def no_sync(self, is_on: bool = True) -> AbstractContextManager[None]:
        """Inside, gradients accumulate on their rank: for all micro-batches of a step but the last. Not if is_on is false."""
        return self.gradients.no_sync(is_on)

    def synchronize(self) -> None:
        """Wait until gradients are means over the ranks, and share the state of FP8 scaling. Once per optimizer step."""
        self.gradients.finish()
        share_scaling(self.model, self.stage)

    def clip_grad_norm_(self, max_norm: float = math.inf) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most max_norm. Returns the norm before, fp32 ()."""
        if self._sharded is not None:
            return self._sharded.clip_grad_norm_(max_norm)
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def publish(self) -> None:
        """Give every rank the whole weights after the optimizer's step."""
        if self._sharded is not None:
            self._sharded.publish()


class OwnLoop(Parallel):
    """`Parallel` for a loop that only calls `backward` and `optimizer.step`: all else happens in hooks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, axis: Axis, zero_stage: int) -> None:
        broadcast_parameters(model, axis)
        _broadcast_masters(optimizer, axis)
        super().__init__(model, optimizer, axis, axis, zero_stage=zero_stage)
        self.gradients.finishes_itself = True
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def clip_grad_norm_(self, max_norm: float = math.inf) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most max_norm. Returns the norm before, fp32 ()."""
        self._finish()
        return super().clip_grad_norm_(max_norm)

    def _before_step(self, *_step: Any) -> None:
        self._finish()
        share_scaling(self.model, self.stage)

    def _after_step(self, *_step: Any) -> None:
        self.gradients.is_finished = False
        self.publish()

    def _finish(self) -> None:
        """Take part in the exchange on a rank where no gradient has arrived."""
        if not self.gradients.is_finished:
            self.gradients.finish()


def parallelize(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, zero_stage: int = 0, group: dist.ProcessGroup | None = None
) -> Parallel:
    """Train a model, converted by `initialize` or not, on all ranks of a process group; all ranks call it together.

    Call it after `initialize`, with the model on its device; the ranks then start from the first rank's parameters. After a
    backward pass outside `no_sync`, gradients are means over the ranks.

    zero_stage: 1 shards optimizer states, master weights and residuals. Gradients are then those of pieces: clip by
    `Parallel.clip_grad_norm_`; all ranks call `state_dict` and `load_state_dict`, of model and optimizer, together.
    group: by default all ranks of the world; a single process needs none.
    Raises ValueError without a process group under torchrun, for a stage that is not built, and for an optimizer that cannot be
    sharded.
    """
    is_ready = dist.is_available() and dist.is_initialized()
    if not is_ready and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and there is no process group; allowed: one that is initialized. Call "
            "torch.distributed.init_process_group() before initialize and parallelize."
        )
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    size, rank = (dist.get_world_size(group), dist.get_rank(group)) if is_ready else (1, 0)
    return OwnLoop(model, optimizer, Axis("data", size, rank, device, group), zero_stage)


def _broadcast_masters(optimizer: torch.optim.Optimizer, axis: Axis) -> None:
    """Give every rank the first rank's master weights, of which its codes are the rounding."""
    for state in optimizer.state.values():
        for entries in state.get("master_weights", {}).values():
            axis.broadcast_(entries)
