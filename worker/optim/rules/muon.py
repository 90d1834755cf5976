"""Muon: the orthogonalized momentum of hidden matrices, and AdamW for all other parameters.

    momentum  = mu · momentum + (1 - mu) · gradient
    matrix    = (1 - mu) · gradient + mu · momentum                    Nesterov
    direction = U @ V.T of matrix = U @ S @ V.T, approximately: five steps of Newton-Schulz
    weight   *= 1 - lr · weight_decay
    weight   -= lr · 0.2 · sqrt(max(N, K)) · direction

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the factor is that of Liu et al. 2025, "Muon is
scalable for LLM training" (arXiv 2502.16982), section 2.2: an update has the root mean square of AdamW's, whose learning rate
and weight decay carry over. torch.optim.Muon has the same with adjust_lr_fn="match_rms_adamw".

A group with `use_muon` holds matrices (N, K), or stacks of matrices (E, N, K), each orthogonalized by itself.
`hidden_matrices` finds them in a model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octet.api_schemas.conversion import HEADS, matches
from octet.api_schemas.optimization import OptimizerSpec
from octet.worker.fp8.experts import expert_stacks
from octet.worker.fp8.fsdp import is_shard
from octet.worker.fp8.layout import layout_of
from octet.worker.optim.optimizer import LowBitOptimizer
from octet.worker.optim.rules.adam import Adam
from octet.worker.optim.rules.rule import SIGNED_CODECS, Defaults, Group, MatrixRule, Rule

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The factors of x, x³ and x⁵ in a step of Newton-Schulz, which moves each singular value x."""
NUM_STEPS = 5
MIN_NORM = 1e-7
"""A matrix of a smaller Frobenius norm is divided by this, as in torch."""
LARGEST_ELEMENT = 1.25
"""No element of a direction is larger than its largest singular value, and a step leaves none above 1.2025, the maximum of its
polynomial in [0, 1.2025]. The rest is for rounding in bf16. What is larger is clamped: it scales stored weights."""
RMS = 0.2
"""The root mean square of AdamW's updates, which these have at singular values of 1."""


@dataclass(frozen=True)
class MuonHyperparameters(Defaults):
    """The hyperparameters that a parameter group may set. Weight decay is decoupled.

    momentum: of matrices. betas, eps: of AdamW, in groups where `use_muon` is False. lr, weight_decay: of both.
    """

    lr: float | Tensor = 1e-3
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decoupled_weight_decay: bool = True
    maximize: bool = False
    use_muon: bool = True
    exp_avg_codec: str = "fp8-dre"
    exp_avg_sq_codec: str = "fp16-block"


class OrthogonalizedMomentum(MatrixRule):
    """The rule of matrices."""

    name = "muon"
    defaults = MuonHyperparameters
    state_codecs: ClassVar = {"exp_avg": SIGNED_CODECS}

    def advance_(
        self, states: Mapping[str, Tensor], gradient: Tensor, step: int, group: Group
    ) -> tuple[Tensor, float | Tensor]:
        """Return Nesterov's average of the gradients, and lr."""
        momentum, exp_avg = group["momentum"], states["exp_avg"]
        arriving = gradient * (1 - momentum)
        exp_avg.mul_(momentum).add_(arriving)
        return arriving.add_(exp_avg * momentum), group["lr"]

    def direction_of(self, matrix: Tensor) -> Tensor:
        """Return the orthogonalized matrix."""
        return newton_schulz(matrix).clamp_(-LARGEST_ELEMENT, LARGEST_ELEMENT)

    def matrix_dtype(self, device: torch.device) -> torch.dtype:
        """Return bf16 on accelerators, as Jordan et al.; a CPU multiplies fp32 faster."""
        return torch.float32 if device.type == "cpu" else torch.bfloat16

    def largest_change(self, step: int, group: Group) -> float | Tensor:
        """lr times the largest element of a direction; `update_scale` depends on the shape."""
        return group["lr"] * LARGEST_ELEMENT

    def update_scale(self, shape: tuple[int, ...]) -> float:
        """0.2 · sqrt(max(N, K))."""
        return RMS * math.sqrt(max(shape[-2:]))

    def kernel_hyperparameters(self, group: Group) -> tuple[float, ...]:
        """None: no kernel steps a matrix."""
        return ()


class Muon(Adam):
    """Muon for groups with `use_muon`, AdamW for the others."""

    name = "muon"
    defaults = MuonHyperparameters
    fixed = ("use_muon",)
    _matrices: ClassVar[Rule] = OrthogonalizedMomentum()
    _others: ClassVar[Rule] = Adam()

    def of(self, group: Group) -> Rule:
        """Return the rule of matrices, or Adam's."""
        return self._matrices if group["use_muon"] else self._others

    def check(self, group: Group) -> None:
        """Raise ValueError also for what is no matrix, or whose matrix no rank has, in a group with `use_muon`."""
        super().check(group)
        for parameter in group["params"] if group["use_muon"] else ():
            if parameter.dim() not in (2, 3):
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is in a group with use_muon; allowed: matrices (N, K) and "
                    "stacks of them (E, N, K). Make the groups by octet.worker.optim.muon_groups(model), or give it a "
                    "group with use_muon=False, which AdamW steps."
                )
            if is_shard(parameter):
                raise ValueError(
                    "a parameter in a group with use_muon is sharded by fully_shard; allowed: whole matrices, which Muon "
                    "orthogonalizes. Use octet.parallelize(zero_stage=1), which gathers them, or another optimizer."
                )


class LowBitMuon(LowBitOptimizer):
    """Muon and AdamW; hyperparameters in `MuonHyperparameters`, the rest in `LowBitOptimizer`."""

    rule = Muon()


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that Muon orthogonalizes: weights of linear layers, but heads, and stacks of experts.

    A weight that a head or an embedding has, too, is none.
    """
    found: list[nn.Parameter] = expert_stacks(model)
    elsewhere: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        if layout_of(module) is not None and not matches(name, HEADS):
            found.append(module.get_parameter("weight"))
        elif isinstance(module, nn.Embedding) or layout_of(module) is not None:
            elsewhere.update(module.parameters(recurse=False))
    return [parameter for parameter in dict.fromkeys(found) if parameter not in elsewhere]


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups for `LowBitMuon`: hidden matrices, and all other parameters, which AdamW steps."""
    matrices = set(hidden_matrices(model))
    return [
        {"params": [parameter for parameter in model.parameters() if parameter in matrices], "use_muon": True},
        {"params": [parameter for parameter in model.parameters() if parameter not in matrices], "use_muon": False},
    ]


def build_muon(groups: list[Group], spec: OptimizerSpec, _gradient_clip: float | None) -> LowBitMuon:
    """Build Muon as a job's spec has it."""
    options = MuonHyperparameters(spec.learning_rate, spec.momentum, spec.betas, spec.eps, spec.weight_decay)
    return LowBitMuon(groups, options)


def newton_schulz(matrix: Tensor) -> Tensor:
    """Orthogonalize a matrix (N, K), or each of a stack (E, N, K), in its dtype: singular values become 0.7 to 1.2."""
    multiply_add = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if is_tall else matrix  # the smaller of the two Gram matrices
    wide = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=MIN_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_STEPS):
        gram = wide @ wide.mT
        wide = multiply_add(wide, multiply_add(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide
