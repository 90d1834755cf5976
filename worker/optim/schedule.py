"""The learning rate at a step, and which parameters decay."""

import math
from typing import Any

import torch
from torch import nn

from api_schemas import ScheduleSpec


def learning_rate_at(step: int, peak: float, schedule: ScheduleSpec, num_steps: int) -> float:
    """Linear from `peak / warmup_steps`, then half a cosine to `final_fraction` of the peak; `step` counts from 0."""
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    done = (step - schedule.warmup_steps) / max(1, num_steps - 1 - schedule.warmup_steps)
    low = schedule.final_fraction
    return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give all parameter groups the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay the matrices; biases and norms are not decayed (Radford et al. 2018, section 4.1)."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
