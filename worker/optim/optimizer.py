"""The optimizer that users hold: torch's interface to what `states.py` holds and `stepper.py` steps.

Rounding is stochastic from a counter (seed, parameter, its step, element), so a resumed or sharded run draws the same bits.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from octet.worker.optim.gradients import all_finite, gradient_of
from octet.worker.optim.rules.rule import Group
from octet.worker.optim.states import OptimizerStates
from octet.worker.optim.stepper import Stepper


class Release(Protocol):
    """An object that steps parameters in the backward pass: see `release.py`."""

    def norm(self) -> Tensor:
        """Return the norm of all gradients of the step under way as one vector, fp32 ()."""

    def close(self, finite: Tensor) -> Tensor:
        """End the step. Returns whether all its gradients were finite, and `finite` is true; bool ()."""

    def drop_interrupted_step(self) -> None:
        """Forget a backward pass that an exception has ended."""


class LowBitOptimizer(OptimizerStates):
    """A torch optimizer by a rule, with a codec for each of the rule's states, by parameter group.

    params: parameters or groups, as for any torch optimizer; plain fp32, bf16 and fp16 ones are trained as they are.
    defaults: the rule's hyperparameters, where a group has none of its own.
    Of a `Float8Weight` it steps the parts. E4M3 codes without a residual get an FP16 master weight.
    all_ranks_finite: given whether this rank's gradients are finite (a 0-dim bool), returns whether those of all ranks are.
    fused: one pass by Triton kernels, for which the host does not wait; by default on CUDA. Parameters that are not contiguous
    are stepped by plain torch everywhere.

    A step with a non-finite gradient changes nothing and is counted in `num_skipped_steps`. `held` is a read-only view of what
    a parameter holds. Raises ValueError for hyperparameters or codecs that the rule does not allow, and TypeError for another
    rule's defaults.
    """

    released: Release | None = None
    """Steps parameters in the backward pass, where `release_gradients` was called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._stepper = Stepper()
        super().__init__(*args, **kwargs)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, or none if any gradient on any rank is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._stepper.follow(self, updates)
        finite = all_finite(gradient_of(parameter) for parameter, _ in updates)
        if self.all_ranks_finite is not None:
            finite = self.all_ranks_finite(finite)
        if self.shards is not None:
            finite = self.shards.agree_on_finite(finite)
        self._stepper.step(self, updates, finite)
        if self.shards is not None:
            self.shards.agree_on_scales(self, [self._weights[held] for held, _ in updates if held in self._weights])
        if self.released is not None:
            finite = self.released.close(finite)
        self.count_step(finite)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, as torch's method; a step whose backward pass an exception has ended is over."""
        super().zero_grad(set_to_none)
        if self.released is not None:
            self.released.drop_interrupted_step()

    @torch.no_grad()
    def step_parameter(self, parameter: Tensor, group: Group) -> Tensor:
        """Update one parameter by its gradient, unless that is not finite. Returns whether it is, bool (). See `release.py`."""
        self.follow_weight(parameter)
        finite = all_finite([gradient_of(parameter)])
        self._stepper.step(self, [(parameter, group)], finite, alone=parameter)
        return finite

    def send_hyperparameters(self) -> None:
        """Bring the groups' hyperparameters on the devices up to date: the replay of a recorded step reads them there."""
        self._stepper.send_hyperparameters(self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold; the tables on devices are made again."""
        return super().__getstate__() | {"_stepper": Stepper()}
