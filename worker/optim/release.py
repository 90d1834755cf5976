"""Gradient release: the backward pass steps each parameter, and frees its gradient before the next one is complete.

The order of a step's parameters changes no bit, since a parameter's update reads only its own gradient and states (Lv et al.
2023, LOMO, arXiv 2306.09782, section 3.2, with states). What needs all gradients at once is not possible: clipping by their
norm, accumulation over backward passes, means over ranks, and skipping a whole step. A parameter with a non-finite gradient is
skipped alone; `num_skipped_steps` counts a step in which any was.
"""

from functools import partial
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octet.worker.fp8.gradient import norms_of
from octet.worker.fp8.loss_scaling import STATE_BUFFER
from octet.worker.optim.optimizer import LowBitOptimizer


class GradientRelease:
    """The hooks of one optimizer, and what they know of the step under way. `optimizer.step()` closes the step."""

    def __init__(self, optimizer: LowBitOptimizer) -> None:
        self.optimizer = optimizer
        self.stepped: set[Tensor] = set()
        self.norms: list[Tensor] = []
        self.finite: list[Tensor] = []
        # A parameter holds its hooks where Python's collector cannot see them: a strong reference would free nothing.
        hooks = [partial(_step_at, ref(self), group_index=index) for index in range(len(optimizer.param_groups))]
        self.handles = [
            parameter.register_post_accumulate_grad_hook(hooks[index])
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def norm(self) -> Tensor:
        """Return the norm of all gradients of the step under way as one vector, fp32 ()."""
        if not self.norms:
            return torch.tensor(0.0)
        return torch.linalg.vector_norm(torch.stack([norm.float() for norm in self.norms]))

    def close(self, finite: Tensor) -> Tensor:
        """End the step. Returns whether all its gradients were finite, and `finite` is true; bool ()."""
        flags = self.finite
        self.drop_interrupted_step()
        if not flags:
            return finite
        if finite.is_cpu and not bool(finite):  # of gradients that nobody released; the device is not asked
            return torch.zeros_like(flags[0])
        others = [] if finite.is_cpu else [finite]
        return torch.stack([flag.to(flags[0].device) for flag in (*flags, *others)]).all()

    def drop_interrupted_step(self) -> None:
        """Forget a backward pass that an exception has ended. What it has stepped stays stepped."""
        self.stepped, self.norms, self.finite = set(), [], []

    @torch.no_grad()
    def _step(self, parameter: Tensor, group_index: int) -> None:
        if parameter.grad is None:
            return
        if parameter in self.stepped:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one step, and its first is stepped "
                "already; allowed with gradient release: one backward pass for each optimizer.step(), and codes of a weight in "
                "one layer only. Call optimizer.step() after each backward pass, or leave gradient release out."
            )
        self.stepped.add(parameter)
        self.norms += norms_of([parameter.grad])
        self.finite.append(self.optimizer.step_parameter(parameter, self.optimizer.param_groups[group_index]))
        parameter.grad = None


def _step_at(release: "ref[GradientRelease]", parameter: Tensor, group_index: int) -> None:
    """Run the hook of a parameter's gradient, which only accumulates once the optimizer is gone."""
    present = release()
    if present is not None:
        present._step(parameter, group_index)


def release_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> GradientRelease:
    """Let `optimizer` step each parameter as soon as its gradient is complete, in `loss.backward()`, and free the gradient.

    Call it after `initialize`, with learning rates set before each backward pass; `optimizer.step()` still ends each step.
    Weights, states and losses equal those of the ordinary step, bit for bit. `norm()` of the result is the gradients' norm,
    until `optimizer.step()`; torch's `clip_grad_norm_` finds no gradients. A copied or unpickled model and optimizer step as
    usual, since torch copies no hooks of parameters: call it again. Raises ValueError for an optimizer that is not
    from `initialize`, for several ranks, and at levels that scale the loss.
    """
    if not isinstance(optimizer, LowBitOptimizer):
        raise ValueError(
            f"gradient release steps a {type(optimizer).__name__}; allowed: AdamW, Adam, Lion and SGD after initialize. Call "
            "initialize first."
        )
    if optimizer.released is not None:
        raise ValueError("the optimizer releases gradients already; allowed: one call. Remove the second.")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"gradient release got {dist.get_world_size()} ranks; allowed: 1. A gradient is complete only when all ranks' are "
            "averaged. Leave it out, or train on one rank."
        )
    if STATE_BUFFER in dict(model.named_buffers()):
        raise ValueError(
            "gradient release got a model that scales its loss; allowed: other levels than fp16-amp, which skips a step as a "
            "whole after the last gradient. Use bf16-amp, or leave it out."
        )
    optimizer.released = GradientRelease(optimizer)
    return optimizer.released
