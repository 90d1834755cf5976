"""Take over an optimizer for a level: its parameter groups, and its states if it has stepped."""

from dataclasses import fields
from typing import Any

import torch

from octet.api_schemas.levels import Level
from octet.worker.fp8.casts import TRAINABLE_DTYPES
from octet.worker.optim.optimizer import LowBitOptimizer
from octet.worker.optim.registry import OPTIMIZERS
from octet.worker.optim.rules.adam import LowBitAdamW
from octet.worker.optim.shards import check_states

REPRESENTABLE: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.AdamW, torch.optim.Adam, *OPTIMIZERS)
_UNREPRESENTABLE_OPTIONS = ("amsgrad", "differentiable")
_IMPLEMENTATION_OPTIONS = ("foreach", "capturable", "fused")  # how torch computes; the result is the same


def adopt(optimizer: torch.optim.Optimizer, level: Level, *, seed: int = 0) -> LowBitOptimizer:
    """Return an optimizer with the groups, hyperparameters and states of another one, its states stored as the level says.

    torch's Adam and AdamW become a `LowBitAdamW`; an optimizer of `OPTIMIZERS` becomes one of its own class. A group may
    name codecs of its own (`exp_avg_codec`, `exp_avg_sq_codec`). Raises ValueError for what cannot be represented.
    """
    if type(optimizer) not in REPRESENTABLE:
        allowed = ", ".join(f"{known.__module__.split('.optim')[0]}.optim.{known.__name__}" for known in REPRESENTABLE)
        raise ValueError(
            f"{type(optimizer).__name__} cannot hold its states in few bits; allowed: {allowed}. "
            "Use one of these, or a level that keeps fp32 states."
        )
    optimizer_class: type[LowBitOptimizer] = type(optimizer) if isinstance(optimizer, LowBitOptimizer) else LowBitAdamW
    own: dict[str, Any] = {f"{state}_codec": getattr(level, state) for state in optimizer_class.rule.state_codecs}
    if optimizer_class is not type(optimizer):
        own["decoupled_weight_decay"] = isinstance(optimizer, torch.optim.AdamW)
    adopted = optimizer_class(
        [own_options(group, optimizer) for group in optimizer.param_groups],
        optimizer_class.rule.defaults(**own),
        seed=seed,
        all_ranks_finite=getattr(optimizer, "all_ranks_finite", None),
    )
    if any(int(state["step"]) for state in optimizer.state.values()):
        adopted.load_state_dict(optimizer.state_dict())
        adopted.seed = seed
    return adopted


def own_options(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the group without options that only choose how torch computes, and without codecs that it did not name."""
    for option in _UNREPRESENTABLE_OPTIONS:
        if group.get(option):
            raise ValueError(f"{option}=True is not supported with low-bit states; allowed: False. Switch it off.")
    dropped = {*_UNREPRESENTABLE_OPTIONS, *_IMPLEMENTATION_OPTIONS}
    dropped |= {name for name in group if name.endswith("_codec") and group[name] == optimizer.defaults.get(name)}
    return {name: value for name, value in group.items() if name not in dropped}


def check_adoptable(optimizer: torch.optim.Optimizer, level: Level) -> None:
    """Raise ValueError for options, hyperparameters, dtypes or states that `adopt` refuses. Changes nothing.

    optimizer: of a class in REPRESENTABLE.
    """
    rule = type(optimizer).rule if isinstance(optimizer, LowBitOptimizer) else LowBitAdamW.rule
    defaults = rule.defaults(**{f"{state}_codec": getattr(level, state) for state in rule.state_codecs})
    own = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    for group in optimizer.param_groups:
        options = own | own_options(group, optimizer)
        rule.check(options)
        for parameter in group["params"]:
            if parameter.dtype not in TRAINABLE_DTYPES:
                raise ValueError(
                    f"a parameter has dtype {parameter.dtype}; allowed: {', '.join(map(str, TRAINABLE_DTYPES))}. "
                    "Cast the model, or give this parameter an optimizer of its own."
                )
            if state := optimizer.state.get(parameter):
                check_states(state, rule.of(options))
