"""Every optimizer by the name that a job gives it: the class that steps by its rule, and how it is built from a job's spec."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from octet.api_schemas.optimization import OptimizerName, OptimizerSpec
from octet.worker.kernels.torch_private import leave_the_compiler_unloaded
from octet.worker.optim.optimizer import LowBitOptimizer
from octet.worker.optim.rules import adam, lion, muon, sgd
from octet.worker.optim.rules.rule import Group


@dataclass(frozen=True)
class Registered:
    """An optimizer that a job can name.

    low_bit: steps by its rule on states in few bits. user: makes one of parameters or groups, with default hyperparameters,
    before `initialize`; torch's own class where `initialize` takes that over. build: makes one of parameter groups, a job's
    spec and the norm that gradients are clipped to, if they are. groups: a model's parameters for `user`.
    """

    low_bit: type[LowBitOptimizer]
    user: Callable[..., torch.optim.Optimizer]
    build: Callable[[list[Group], OptimizerSpec, float | None], torch.optim.Optimizer]
    groups: Callable[[nn.Module], Iterable[Any]] = nn.Module.parameters


REGISTRY: Mapping[OptimizerName, Registered] = {
    "adamw": Registered(adam.LowBitAdamW, torch.optim.AdamW, adam.build_adamw),
    "adam": Registered(adam.LowBitAdamW, torch.optim.Adam, adam.build_adam),
    "lion": Registered(lion.LowBitLion, lion.LowBitLion, lion.build_lion),
    "muon": Registered(muon.LowBitMuon, muon.LowBitMuon, muon.build_muon, muon.muon_groups),
    "sgd": Registered(sgd.LowBitSGD, sgd.LowBitSGD, sgd.build_sgd),
}
OPTIMIZERS: tuple[type[LowBitOptimizer], ...] = tuple(dict.fromkeys(each.low_bit for each in REGISTRY.values()))
"""One for each rule."""


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
