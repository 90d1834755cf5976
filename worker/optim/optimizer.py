"""The optimizer that users hold: torch's interface to what `states.py` holds, and its step.

Rounding is stochastic from a counter (seed, parameter, its step, element), so a resumed or sharded run draws the same bits.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from octet.worker.optim import walker
from octet.worker.optim.gradients import all_finite, gradient_of
from octet.worker.optim.rules.rule import Group
from octet.worker.optim.states import OptimizerStates


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


Updates = list[tuple[Tensor, Group]]
"""Parameters that have gradients, each with its group."""


class Stepper:
    """Steps an optimizer's parameters. Keeps the tables that were sent to devices for the kernels, and no state of training."""

    def __init__(self) -> None:
        self.fused_steps: dict[Tensor | None, Any] = {}
        """A `FusedStep` by the parameter that is stepped alone; None: all others."""
        self.cache: Any = None
        """An `AddressCache` of the last step of all parameters, while what it holds is where it was."""

    def follow(self, optimizer: OptimizerStates, updates: Updates) -> None:
        """Let the states follow parameters that were moved or loaded since the last step of all parameters."""
        if self.cache is None or not self.cache.is_unchanged(optimizer, updates):
            self.cache = None
            for parameter, _ in updates:
                optimizer.follow_weight(parameter)

    def step(self, optimizer: OptimizerStates, updates: Updates, finite: Tensor, alone: Tensor | None = None) -> None:
        """Step parameters if `finite`, bool (), is true. alone: the only one."""
        if optimizer.host_states is None:
            self._step_here(optimizer, updates, finite, alone)
            return
        for parameter, group in updates:
            optimizer.state[parameter] or optimizer.allocate(parameter, group)
        for update in optimizer.host_states.visit(updates, optimizer.state):
            self._step_here(optimizer, [update], finite, update[0])

    def send_hyperparameters(self, groups: list[Group]) -> None:
        """Bring the groups' hyperparameters on the devices up to date: the replay of a recorded step reads them there."""
        for step in self.fused_steps.values():
            step.send_groups_again(groups)

    def _step_here(self, optimizer: OptimizerStates, updates: Updates, finite: Tensor, alone: Tensor | None) -> None:
        plain = self._step_fused(optimizer, updates, finite, alone)
        if (plain or optimizer.matrices is not None) and finite:  # the one value that the host waits for
            if optimizer.matrices is not None:
                plain = optimizer.matrices.due(plain)
            for parameter, group in plain:
                walker.update(optimizer, parameter, group)

    def _step_fused(self, optimizer: OptimizerStates, updates: Updates, finite: Tensor, alone: Tensor | None) -> Updates:
        """Step the parameters that the kernels take; returns the others."""
        if self.cache is not None and alone is None:
            self.fused_steps[None].run(self.cache.rows, optimizer.param_groups, finite, optimizer.seed)
            return []
        fused = [update for update in updates if optimizer.is_fused(update[0])]
        plain = [update for update in updates if not optimizer.is_fused(update[0])] if len(fused) < len(updates) else []
        if not fused:
            return plain
        from octet.worker.optim.address_cache import AddressCache  # loads Triton
        from octet.worker.optim.fused import FusedStep, Rows, describe

        rule = optimizer.rule.of(fused[0][1])  # one for all: no kernel steps what a `MatrixRule` does
        if alone not in self.fused_steps:
            self.fused_steps[alone] = FusedStep(rule)
        rows = Rows(describe(optimizer, fused), rule)
        self.fused_steps[alone].run(rows, optimizer.param_groups, finite, optimizer.seed)
        if alone is None and not plain and optimizer.host_states is None:
            self.cache = AddressCache(optimizer, updates, rows)
        return plain
