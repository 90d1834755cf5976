"""Make the optimizer that a job asks for; `initialize` then stores its states as the job's level says."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from api_schemas import OptimizerSpec
from worker.optim.eager import leave_the_compiler_unloaded
from worker.optim.lion import LionHyperparameters, LowBitLion

BY_NAME: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "lion": LowBitLion,
}


def build_optimizer(parameter_groups: list[dict[str, Any]], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """An optimizer of fp32 parameters by the name in the spec, before conversion. A group's own `weight_decay` goes first."""
    leave_the_compiler_unloaded()
    match spec.name:
        case "adamw":
            return torch.optim.AdamW(
                parameter_groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
            )
        case "lion":
            return LowBitLion(
                parameter_groups, LionHyperparameters(spec.learning_rate, spec.betas, weight_decay=spec.weight_decay)
            )


def make_by_name(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of all of a model's parameters, with its class's default hyperparameters. ValueError for other names."""
    if name not in BY_NAME:
        raise ValueError(f"optimizer_name is {name!r}; allowed: {', '.join(BY_NAME)}. Or make an optimizer and pass it.")
    return BY_NAME[name](model.parameters())
