"""Every optimizer by the name that a job gives it: the class that steps by its rule, and how it is built from a job's spec."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from octet.api_schemas.optimization import OptimizerName, OptimizerSpec
from octet.worker.optim.optimizer import LowBitOptimizer
from octet.worker.optim.rules import adam, lion, sgd
from octet.worker.optim.rules.rule import Group


@dataclass(frozen=True)
class Registered:
    """An optimizer that a job can name.

    low_bit: steps by its rule on states in few bits. user: makes one of parameters, with default hyperparameters, before
    `initialize`; torch's own class where `initialize` takes that over. build: makes one of parameter groups, a job's spec and
    the norm that gradients are clipped to, if they are.
    """

    low_bit: type[LowBitOptimizer]
    user: Callable[..., torch.optim.Optimizer]
    build: Callable[[list[Group], OptimizerSpec, float | None], torch.optim.Optimizer]


REGISTRY: Mapping[OptimizerName, Registered] = {
    "adamw": Registered(adam.LowBitAdamW, torch.optim.AdamW, adam.build_adamw),
    "adam": Registered(adam.LowBitAdamW, torch.optim.Adam, adam.build_adam),
    "lion": Registered(lion.LowBitLion, lion.LowBitLion, lion.build_lion),
    "sgd": Registered(sgd.LowBitSGD, sgd.LowBitSGD, sgd.build_sgd),
}
OPTIMIZERS: tuple[type[LowBitOptimizer], ...] = tuple(dict.fromkeys(each.low_bit for each in REGISTRY.values()))
"""One for each rule."""
