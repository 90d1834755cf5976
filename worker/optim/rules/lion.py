"""Lion: the sign of an average of gradients, and one state.

    weight *= 1 - lr · weight_decay
    weight -= lr · sign(beta1 · exp_avg + (1 - beta1) · gradient)
    exp_avg = beta2 · exp_avg + (1 - beta2) · gradient

Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675), algorithm 2. Every weight moves by lr:
the authors use a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the same factor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from octet.api_schemas.optimization import OptimizerSpec
from octet.worker.optim.optimizer import LowBitOptimizer
from octet.worker.optim.rules.rule import SIGNED_CODECS, Defaults, Group, Rule


@dataclass(frozen=True)
class LionHyperparameters(Defaults):
    """The hyperparameters that a parameter group may set. The default betas are the paper's; weight decay is decoupled."""

    lr: float | Tensor = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False
    exp_avg_codec: str = "fp8-dre"


class Lion(Rule):
    """Lion, with decoupled weight decay."""

    name = "lion"
    defaults = LionHyperparameters
    state_codecs: ClassVar = {"exp_avg": SIGNED_CODECS}

    def advance_(
        self, states: Mapping[str, Tensor], gradient: Tensor, step: int, group: Group
    ) -> tuple[Tensor, float | Tensor]:
        """Direction: -1, 0 or 1; NaN where the average is not finite, since the sign of NaN is 0 and would hide it."""
        beta1, beta2 = group["betas"]
        exp_avg = states["exp_avg"]
        mixed = exp_avg * beta1 + gradient * (1 - beta1)
        exp_avg.mul_(beta2).add_(gradient * (1 - beta2))
        return mixed.sign().add_(mixed.mul_(0.0)), group["lr"]

    def largest_change(self, step: int, group: Group) -> float | Tensor:
        """lr, in every step."""
        return group["lr"]

    def kernel_hyperparameters(self, group: Group) -> tuple[float, ...]:
        """The betas."""
        return tuple(group["betas"])


class LowBitLion(LowBitOptimizer):
    """Lion; hyperparameters in `LionHyperparameters`, the rest in `LowBitOptimizer`."""

    rule = Lion()


def build_lion(groups: list[Group], spec: OptimizerSpec, _gradient_clip: float | None) -> LowBitLion:
    """Build Lion as a job's spec has it."""
    return LowBitLion(groups, LionHyperparameters(spec.learning_rate, spec.betas, weight_decay=spec.weight_decay))
