"""Check that `adopt` will be able to take over an optimizer, before a model is converted for it."""

from dataclasses import fields

import torch

from octet.api_schemas.levels import Level
from octet.worker.fp8.casts import TRAINABLE_DTYPES
from octet.worker.optim.adopt import own_options
from octet.worker.optim.optimizer import LowBitOptimizer
from octet.worker.optim.rules.adam import LowBitAdamW
from octet.worker.optim.saved_states import check_states


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
