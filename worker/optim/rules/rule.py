"""The base of optimizer rules. A rule declares its states, hyperparameters and the arithmetic of one step on fp32 tensors.

`optimizer.py` walks over the stored tensors and depends on no rule; no rule depends on how tensors
are stored. The CUDA kernel repeats a rule's arithmetic bit for bit
(`worker/kernels/cuda/optimizer_rules.py`): each operation here is one rounding, in the order
written, with no fused multiply-add, and roots come from `kernels.sqrt`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from octet.worker.optim.codecs import CODECS

Group = dict[str, Any]
"""A torch parameter group: `params` and the hyperparameters by name."""
Check = tuple[Callable[[Any], bool], str]
"""A test of a value, and the allowed values in words."""

CHECKS: Mapping[str, Check] = {
    "lr": (lambda lr: lr >= 0, "at least 0"),
    "betas": (lambda betas: all(0 <= beta < 1 for beta in betas), "two numbers from 0 up to, not including, 1"),
    "eps": (lambda eps: eps >= 0, "at least 0"),
    "momentum": (lambda momentum: 0 <= momentum < 1, "from 0 up to, not including, 1"),
    "max_gradient": (lambda largest: 0 < largest < math.inf, "above 0 and finite"),
    "weight_decay": (lambda weight_decay: weight_decay >= 0, "at least 0"),
}
SIGNED_CODECS = tuple(name for name in CODECS if name != "uint8-companded")
"""The codecs of a state that may be negative."""


@dataclass(frozen=True)
class Defaults:
    """The hyperparameters of a rule with their defaults. Each rule has its own, with at least `lr`, `weight_decay`, `maximize`
    and, for each of its states, `{state}_codec`."""


class Rule(ABC):
    """An optimizer's arithmetic. Instances hold nothing; everything that changes is in the states and the group."""

    name: ClassVar[str]
    """The name in `optimizer_rules.py`."""
    state_codecs: ClassVar[Mapping[str, tuple[str, ...]]]
    """The states in the order of their random streams and kernel columns, each with the codecs that can hold it."""
    defaults: ClassVar[type[Defaults]]
    fixed: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters that decide what is held for a parameter: a loaded state dict does not change them."""
    needs_matrices: ClassVar[bool] = False
    """True for a rule whose direction depends on the whole matrix: see `MatrixRule`."""

    def of(self, group: Group) -> "Rule":
        """Return the rule that steps a group's parameters; itself, unless it combines several."""
        return self

    @abstractmethod
    def advance_(
        self, states: Mapping[str, Tensor], gradient: Tensor, step: int, group: Group
    ) -> tuple[Tensor, float | Tensor]:
        """Update fp32 states in place; returns a new tensor, the direction, and the rate that it is multiplied by.

        gradient: fp32, left alone. step: from 1.
        """

    @abstractmethod
    def largest_change(self, step: int, group: Group) -> float | Tensor:
        """A bound on |rate × direction|: on what one step can add to a weight, apart from weight decay."""

    @abstractmethod
    def kernel_hyperparameters(self, group: Group) -> tuple[float, ...]:
        """The rule's own columns of the kernel's table of groups, at most MAX_RULE_HYPERPARAMETERS."""

    def decays(self, group: Group) -> tuple[float, float]:
        """Weight decay that shrinks the weight (decoupled), and weight decay that is added to the gradient (L2)."""
        return group["weight_decay"], 0.0

    def step_(self, values: Tensor, gradient: Tensor, states: Mapping[str, Tensor], step: int, group: Group) -> None:
        """One step on fp32 tensors: changes values and states in place and leaves the gradient alone. step: from 1."""
        decoupled_decay, l2_decay = self.decays(group)
        if group["maximize"]:
            gradient = -gradient
        if decoupled_decay:
            values.mul_(1 - group["lr"] * decoupled_decay)
        if l2_decay:
            gradient = gradient + values * l2_decay
        direction, rate = self.advance_(states, gradient, step, group)
        values.sub_(direction.mul_(rate))

    def bound_after_step(self, amax: Tensor, step: int, group: Group, shape: tuple[int, ...] = ()) -> Tensor:
        """The magnitude that no weight exceeds after the step, given the largest one before it; fp32, in amax's shape.

        shape: of the whole matrix, for a rule that needs it.
        """
        kept = 1 - group["lr"] * self.decays(group)[0]
        return amax * abs(kept) + self.largest_change(step, group) * self.update_scale(shape)

    def update_scale(self, shape: tuple[int, ...]) -> float:
        """Return the factor of the rate for a matrix of such a shape; 1 for a rule that does not need matrices."""
        return 1.0

    def check(self, group: Group) -> None:
        """Raise ValueError for a hyperparameter or codec that no step could use: its name, what was got, what is allowed."""
        for field in fields(self.defaults):
            if field.name in CHECKS:
                is_allowed, allowed = CHECKS[field.name]
                if not is_allowed(group[field.name]):
                    raise ValueError(
                        f"{field.name} is {group[field.name]}; allowed: {allowed}. Change it in the parameter group."
                    )
        for state, codecs in self.state_codecs.items():
            codec = group[f"{state}_codec"]
            if codec not in codecs:
                raise ValueError(f"{state}_codec is {codec!r}; allowed: {', '.join(codecs)}. Change it in the parameter group.")


class MatrixRule(Rule):
    """A rule whose direction is a function of the whole matrix.

    `advance_` updates the states and returns the elements of the matrix that `direction_of` takes. Every rank that holds a
    part of the matrix advances its own elements, and computes the direction of all of them.
    """

    needs_matrices = True

    @abstractmethod
    def direction_of(self, matrix: Tensor) -> Tensor:
        """Return the direction, (…, N, K), of a matrix or of a stack of matrices, in the matrix's dtype."""

    @abstractmethod
    def matrix_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype in which a device computes directions, and in which ranks gather the matrix."""

    def move_(self, values: Tensor, direction: Tensor, shape: tuple[int, ...], group: Group) -> None:
        """Change fp32 values in place by their elements of the direction, fp32. shape: of the matrix."""
        if decay := self.decays(group)[0]:
            values.mul_(1 - group["lr"] * decay)
        values.sub_(direction * (group["lr"] * self.update_scale(shape)))
