"""Turn the optimizer that a user holds into the one that `adopt` made of it, so that whoever holds it holds the new one.

A learning-rate scheduler that was made before, the user's hooks and their handles, and references to parameter groups stay
valid, and the states of before are released.
"""

from functools import wraps
from typing import Any
from weakref import ref

import torch

from octet.worker.kernels.torch_private import (
    OF_AN_OPTIMIZERS_CLASS,
    OPTIMIZER_HOOKS,
    count_step,
    counts_steps,
    mark_as_counting,
)
from octet.worker.optim.optimizer import LowBitOptimizer


def take_over(given: torch.optim.Optimizer, adopted: LowBitOptimizer) -> LowBitOptimizer:
    """Give `given` the class, groups and states of `adopted`, and return it. Hooks and other attributes stay."""
    is_tracked = counts_steps(given.step)
    hooks = {name: getattr(given, name) for name in OPTIMIZER_HOOKS}
    groups = given.param_groups
    for group, new_group in zip(groups, adopted.param_groups, strict=True):
        group.clear()
        group.update(new_group)
    for name in ("step", *OF_AN_OPTIMIZERS_CLASS):  # what a fused optimizer or a scheduler has changed of its class
        vars(given).pop(name, None)
    given.__class__ = type(adopted)
    vars(given).update(vars(adopted), **hooks, param_groups=groups)
    assert isinstance(given, LowBitOptimizer)
    if is_tracked:
        _track_steps(given)
    return given


def _track_steps(optimizer: LowBitOptimizer) -> None:
    """Note calls of `step`, as torch's schedulers do, which warn where theirs comes first."""
    own_step, reference = type(optimizer).step, ref(optimizer)

    @wraps(own_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        held = reference()
        assert held is not None
        count_step(held)
        return own_step(held, *args, **kwargs)

    mark_as_counting(step)
    optimizer.step = step  # type: ignore[method-assign]
