"""Make the optimizer that a job asks for; `initialize` then stores its states as the job's level says."""

from typing import Any

import torch
from torch import nn

from octet.api_schemas import OptimizerSpec
from octet.worker.kernels.torch_private import leave_the_compiler_unloaded
from octet.worker.optim.registry import REGISTRY


def build_optimizer(
    parameter_groups: list[dict[str, Any]], spec: OptimizerSpec, gradient_clip: float | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer of fp32 parameters that a spec names, before conversion. A group's own `weight_decay` goes first.

    gradient_clip: the largest norm of gradients, by which SGD bounds its steps; None: 1.
    """
    leave_the_compiler_unloaded()
    return REGISTRY[spec.name].build(parameter_groups, spec, gradient_clip)


def make_by_name(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer of all of a model's parameters, with default hyperparameters. ValueError for other names."""
    registered = {str(known): each for known, each in REGISTRY.items()}.get(name)
    if registered is None:
        raise ValueError(f"optimizer_name is {name!r}; allowed: {', '.join(REGISTRY)}. Or make an optimizer and pass it.")
    return registered.user(registered.groups(model))
