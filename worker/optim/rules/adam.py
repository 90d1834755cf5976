"""Adam and AdamW, as torch.optim has them (eps outside the root, after bias correction).

    gradient += weight_decay · weight                                  Adam (L2); AdamW: weight *= 1 - lr · weight_decay
    exp_avg    = beta1 · exp_avg + (1 - beta1) · gradient
    exp_avg_sq = beta2 · exp_avg_sq + (1 - beta2) · gradient²
    weight    -= lr / (1 - beta1^t) · exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)

Where a codec of few bits has rounded a second moment to 0 and the first survives, the quotient has no meaning; it is clamped to
the largest that exact moments can have. Exact moments never reach the bound.

Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octet.api_schemas.optimization import OptimizerSpec
from octet.worker import kernels
from octet.worker.optim.optimizer import LowBitOptimizer
from octet.worker.optim.rules.rule import SIGNED_CODECS, Defaults, Group, Rule

ROUNDING_SLACK = 1.25
"""By how much an update from rounded moments may exceed the largest one from exact moments."""
MAX_UPDATE = 100.0
"""The bound in units of lr where the betas allow none; a larger update saturates."""
ROOTED = (2.0**-100, torch.finfo(torch.float32).max)
"""Second moments are clamped to this range before the root: within it a GPU's root needs no case apart. The root of its lower
end, 1e-15, is negligible next to eps. Where eps is 0 and every gradient was 0, the weight rests instead of becoming NaN."""


@dataclass(frozen=True)
class Hyperparameters(Defaults):
    """The hyperparameters that a parameter group may set; names and defaults are those of torch.optim.AdamW."""

    lr: float | Tensor = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled_weight_decay: bool = True
    maximize: bool = False
    exp_avg_codec: str = "fp8-dre"
    exp_avg_sq_codec: str = "fp16-block"


class Adam(Rule):
    """Adam (L2 weight decay) and AdamW (decoupled weight decay)."""

    name = "adam"
    defaults: ClassVar[type[Defaults]] = Hyperparameters
    state_codecs: ClassVar = {
        "exp_avg": SIGNED_CODECS,
        # A square spans twice the binades: E4M3 would flush some to zero, and the update divides by its root.
        "exp_avg_sq": ("fp32", "fp16-block", "uint8-companded"),
    }

    def decays(self, group: Group) -> tuple[float, float]:
        """Decoupled or L2, as the group says."""
        decay = group["weight_decay"]
        return (decay, 0.0) if group["decoupled_weight_decay"] else (0.0, decay)

    def advance_(
        self, states: Mapping[str, Tensor], gradient: Tensor, step: int, group: Group
    ) -> tuple[Tensor, float | Tensor]:
        """Direction: the first moment over the corrected root of the second one. Rate: lr / (1 - beta1^step)."""
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = states["exp_avg"], states["exp_avg_sq"]
        exp_avg.mul_(beta1).add_(gradient * (1 - beta1))
        exp_avg_sq.mul_(beta2).add_(gradient.square().mul_(1 - beta2))
        denominator = kernels.sqrt(exp_avg_sq.clamp(*ROOTED)).mul_((1 - beta2**step) ** -0.5).add_(group["eps"])
        direction, largest = exp_avg / denominator, self._largest_update(step, group) * (1 - beta1**step)
        return direction.clamp_(-largest, largest), group["lr"] / (1 - beta1**step)

    def largest_change(self, step: int, group: Group) -> float | Tensor:
        """The largest update, or MAX_UPDATE if that is smaller, times lr."""
        return group["lr"] * min(self._largest_update(step, group), MAX_UPDATE)

    def _largest_update(self, step: int, group: Group) -> float:
        """1 in the first step, up to 7.3 later (at betas of 0.9 and 0.999), times ROUNDING_SLACK.

        |exp_avg| <= (1 - beta1) / sqrt(1 - beta2) · sqrt(sum of (beta1² / beta2)^i, i < step) · sqrt(exp_avg_sq), by the
        Cauchy-Schwarz inequality over the gradients that both moments sum. There is no such bound where beta1² >= beta2: Inf.
        """
        beta1, beta2 = group["betas"]
        if beta1**2 >= beta2:
            return math.inf
        ratio = beta1**2 / beta2
        corrected = ((1 - beta2**step) / (1 - beta2)) ** 0.5 * (1 - beta1) / (1 - beta1**step)
        return ROUNDING_SLACK * corrected * ((1 - ratio**step) / (1 - ratio)) ** 0.5

    def kernel_hyperparameters(self, group: Group) -> tuple[float, ...]:
        """The betas, their logarithms, eps, and the two constants of the bound."""
        logarithms = [math.log(beta) if beta else -math.inf for beta in group["betas"]]
        return (*group["betas"], *logarithms, group["eps"], ROUNDING_SLACK, MAX_UPDATE)


class LowBitAdamW(LowBitOptimizer):
    """AdamW (or Adam: `decoupled_weight_decay=False`); hyperparameters in `Hyperparameters`, the rest in `LowBitOptimizer`."""

    rule = Adam()


def build_adamw(groups: list[Group], spec: OptimizerSpec, _gradient_clip: float | None) -> torch.optim.AdamW:
    """Build torch's AdamW, which `initialize` takes over, as a job's spec has it."""
    return torch.optim.AdamW(groups, spec.learning_rate, spec.betas, spec.eps, spec.weight_decay)


def build_adam(groups: list[Group], spec: OptimizerSpec, _gradient_clip: float | None) -> torch.optim.Adam:
    """Build torch's Adam, which `initialize` takes over, as a job's spec has it."""
    return torch.optim.Adam(groups, spec.learning_rate, spec.betas, spec.eps, spec.weight_decay)
