"""The learning rate at a step, and how parameters are grouped: which decay, and whose learning rate is how large."""

import math
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from octet.api_schemas import OptimizerSpec, ScheduleSpec
from octet.worker.common.errors import InvalidConfig
from octet.worker.models.blocks import repeated_blocks
from octet.worker.optim.rules.muon import hidden_matrices

LEARNING_RATE_FACTOR = "learning_rate_factor"
"""The name, in a parameter group, of what the job's learning rate is multiplied by."""


def learning_rate_at(step: int, peak: float, schedule: ScheduleSpec, num_steps: int) -> float:
    """Linear from `peak / warmup_steps` to the peak, then as the schedule says; `step` counts from 0."""
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    first = schedule.warmup_steps
    if schedule.name == "warmup_stable_decay":
        first = max(first, num_steps - 1 - schedule.num_decay_steps(num_steps))
    done = min(1.0, max(0, step - first) / max(1, num_steps - 1 - first))
    low = schedule.final_fraction
    return peak * (low + (1 - low) * _height(schedule, done))


def _height(schedule: ScheduleSpec, done: float) -> float:
    """The way left from 1 to 0 after the share `done` of the steps that go down."""
    match schedule.name:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        case "polynomial":
            return (1 - done) ** schedule.power
        case "linear" | "warmup_stable_decay":
            return 1 - done
        case "constant":
            return 1.0


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give all parameter groups the learning rate of the next step, each times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(LEARNING_RATE_FACTOR, 1.0)


def parameter_groups(model: nn.Module, optimizer: OptimizerSpec) -> list[dict[str, Any]]:
    """Group a model's parameters: matrices decay, biases, norms and what `no_decay` names do not.

    Without `layer_decay` there are two groups (Radford et al. 2018, section 4.1). With it there are two for each depth, whose
    learning rate is multiplied by layer_decay ** (number of blocks above + 1) (Bao et al. 2022, arXiv 2106.08254, appendix).
    With Muon each of these is two: hidden matrices (`hidden_matrices`), and the parameters that AdamW steps.
    Raises InvalidConfig for a glob that names no parameter, and for a layer_decay where no blocks repeat.
    """
    named = list(model.named_parameters())
    _check_globs(optimizer, [name for name, _ in named])
    decays = {
        name: parameter.dim() >= 2 and not name.endswith("bias") and not _is_named(name, optimizer.no_decay)
        for name, parameter in named
    }
    factors = learning_rate_factors(model, optimizer.layer_decay)
    matrices = set(hidden_matrices(model)) if optimizer.name == "muon" else set()
    groups: list[dict[str, Any]] = []
    for factor in sorted(set(factors.values())) or [1.0]:
        for is_decayed, weight_decay in ((True, optimizer.weight_decay), (False, 0.0)):
            found = [p for name, p in named if decays[name] is is_decayed and factors[name] == factor]
            own = {LEARNING_RATE_FACTOR: factor} if optimizer.layer_decay < 1 else {}
            options = {"weight_decay": weight_decay, **own}
            if optimizer.name == "muon":
                groups.append({"params": [p for p in found if p in matrices], **options, "use_muon": True})
                groups.append({"params": [p for p in found if p not in matrices], **options, "use_muon": False})
            else:
                groups.append({"params": found, **options})
    return [group for group in groups if group["params"] or optimizer.layer_decay == 1]


def learning_rate_factors(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Return each parameter's factor by name: 1 behind the last block, layer_decay in it, and so on down to what lies below."""
    names = [name for name, _ in model.named_parameters()]
    if layer_decay == 1:
        return dict.fromkeys(names, 1.0)
    paths = {id(module): path for path, module in model.named_modules()}
    prefixes = [f"{paths[id(block)]}." for block in repeated_blocks(model)]
    if not prefixes:
        raise InvalidConfig("training.optimizer.layer_decay needs a model with repeated blocks; this one has none. Remove it.")
    depth, factors = 0, {}  # parameters are listed from the input to the output
    last = max(number for number, name in enumerate(names) if name.startswith(tuple(prefixes)))
    for number, name in enumerate(names):
        inside = [index for index, prefix in enumerate(prefixes) if name.startswith(prefix)]
        depth = inside[0] + 1 if inside else len(prefixes) + 1 if number > last else depth
        factors[name] = layer_decay ** (len(prefixes) + 1 - depth)
    return factors


def _is_named(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _check_globs(optimizer: OptimizerSpec, names: list[str]) -> None:
    for glob in optimizer.no_decay:
        if not any(fnmatchcase(name, glob) for name in names):
            raise InvalidConfig(
                f"training.optimizer.no_decay has {glob!r}, which names no parameter; allowed: globs of names such as "
                f"{', '.join(names[:3])}. Correct or remove it."
            )
