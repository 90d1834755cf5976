"""Make the optimizer that a job asks for; `initialize` then stores its states as the job's level says."""

from typing import Any

import torch

from api_schemas import OptimizerSpec
from worker.optim.lion import LionHyperparameters, LowBitLion


def build_optimizer(parameter_groups: list[dict[str, Any]], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """An optimizer of fp32 parameters by the name in the spec, before conversion. A group's own `weight_decay` goes first."""
    match spec.name:
        case "adamw":
            return torch.optim.AdamW(
                parameter_groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
            )
        case "lion":
            return LowBitLion(
                parameter_groups, LionHyperparameters(spec.learning_rate, spec.betas, weight_decay=spec.weight_decay)
            )
