"""Make the optimizer that a job asks for; `initialize` then stores its states as the job's level says."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from api_schemas import OptimizerSpec
from worker.optim.eager import leave_the_compiler_unloaded
from worker.optim.lion import LionHyperparameters, LowBitLion
from worker.optim.sgd import LowBitSGD, SGDHyperparameters

BY_NAME: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "lion": LowBitLion,
    "sgd": LowBitSGD,
}


def build_optimizer(
    parameter_groups: list[dict[str, Any]], spec: OptimizerSpec, gradient_clip: float | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer of fp32 parameters that a spec names, before conversion. A group's own `weight_decay` goes first.

    gradient_clip: the largest norm of gradients, by which SGD bounds its steps; None: 1.
    """
    leave_the_compiler_unloaded()
    match spec.name:
        case "adamw":
            return torch.optim.AdamW(
                parameter_groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
            )
        case "adam":
            return torch.optim.Adam(
                parameter_groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
            )
        case "sgd":
            largest = 1.0 if gradient_clip is None else gradient_clip
            return LowBitSGD(
                parameter_groups,
                SGDHyperparameters(spec.learning_rate, spec.momentum, largest, weight_decay=spec.weight_decay),
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
