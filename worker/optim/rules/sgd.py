"""SGD with momentum, as torch.optim.SGD has it without dampening and Nesterov's variant, and one state.

    gradient += weight_decay · weight
    gradient  = gradient clamped to ±max_gradient
    exp_avg   = momentum · exp_avg + gradient
    weight   -= lr · exp_avg

Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning", section 2. `exp_avg`, torch's
momentum buffer, is an average of gradients times 1 / (1 - momentum). The clamp is what bounds a step, and stored weights are
scaled by the bound: where gradients are clipped to a norm of at most max_gradient, only weight decay can reach it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from octet.api_schemas.optimization import OptimizerSpec
from octet.worker.optim.optimizer import LowBitOptimizer
from octet.worker.optim.rules.rule import SIGNED_CODECS, Defaults, Group, Rule

ROUNDING_SLACK = 1.25
"""By how much a momentum of rounded states may exceed the largest one of exact states; beyond it is clamped."""


@dataclass(frozen=True)
class SGDHyperparameters(Defaults):
    """The hyperparameters that a parameter group may set. max_gradient: elements of a gradient are clamped to ±this."""

    lr: float | Tensor = 1e-3
    momentum: float = 0.9
    max_gradient: float = 1.0
    weight_decay: float = 0.0
    maximize: bool = False
    exp_avg_codec: str = "fp8-dre"


class SGD(Rule):
    """SGD with momentum, with L2 weight decay."""

    name = "sgd"
    defaults = SGDHyperparameters
    state_codecs: ClassVar = {"exp_avg": SIGNED_CODECS}

    def decays(self, group: Group) -> tuple[float, float]:
        """All of it is added to the gradient."""
        return 0.0, group["weight_decay"]

    def advance_(
        self, states: Mapping[str, Tensor], gradient: Tensor, step: int, group: Group
    ) -> tuple[Tensor, float | Tensor]:
        """Direction: the new momentum. Rate: lr."""
        largest = group["max_gradient"]
        exp_avg = states["exp_avg"]
        exp_avg.mul_(group["momentum"]).add_(gradient.clamp(-largest, largest))
        largest_direction = self._largest_direction(group)
        return exp_avg.clamp(-largest_direction, largest_direction), group["lr"]

    def largest_change(self, step: int, group: Group) -> float | Tensor:
        """lr times the largest momentum."""
        return group["lr"] * self._largest_direction(group)

    def _largest_direction(self, group: Group) -> float:
        """The sum of the geometric series of the largest gradient, times ROUNDING_SLACK."""
        return float(ROUNDING_SLACK * group["max_gradient"] / (1 - group["momentum"]))

    def kernel_hyperparameters(self, group: Group) -> tuple[float, ...]:
        """The momentum, the largest gradient and the largest direction."""
        return group["momentum"], group["max_gradient"], self._largest_direction(group)


class LowBitSGD(LowBitOptimizer):
    """SGD with momentum; hyperparameters in `SGDHyperparameters`, the rest in `LowBitOptimizer`."""

    rule = SGD()


def build_sgd(groups: list[Group], spec: OptimizerSpec, gradient_clip: float | None) -> LowBitSGD:
    """Build SGD as a job's spec has it. gradient_clip: the largest norm of gradients, which bounds its steps; None: 1."""
    largest = 1.0 if gradient_clip is None else gradient_clip
    return LowBitSGD(groups, SGDHyperparameters(spec.learning_rate, spec.momentum, largest, weight_decay=spec.weight_decay))
