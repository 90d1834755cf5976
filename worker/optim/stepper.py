"""Step what an optimizer holds: by kernels where they take a parameter, else by plain torch."""

from typing import Any

from torch import Tensor

from octet.worker.optim import walker
from octet.worker.optim.rules.rule import Group
from octet.worker.optim.states import OptimizerStates

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
