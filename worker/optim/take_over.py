"""Turn the optimizer that a user holds into the one that `adopt` made of it, so that whoever holds it holds the new one.

A learning-rate scheduler that was made before, the user's hooks and their handles, and references to parameter groups stay
valid, and the states of before are released.
"""

from functools import wraps
from typing import Any
from weakref import ref

import torch

from worker.optim.optimizer import LowBitOptimizer

_HOOKS = tuple(
    f"_optimizer_{kind}_hooks"
    for kind in (
        "step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post",
    )
)  # fmt: skip
_OF_ITS_OLD_CLASS = ("step", "_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""Attributes by which torch's optimizers, or a scheduler that wraps `step`, change how a class behaves."""


def take_over(given: torch.optim.Optimizer, adopted: LowBitOptimizer) -> LowBitOptimizer:
    """Give `given` the class, groups and states of `adopted`, and return it. Hooks and other attributes stay."""
    is_tracked = hasattr(given.step, "_wrapped_by_lr_sched")
    hooks = {name: getattr(given, name) for name in _HOOKS}
    groups = given.param_groups
    for group, new_group in zip(groups, adopted.param_groups, strict=True):
        group.clear()
        group.update(new_group)
    for name in _OF_ITS_OLD_CLASS:
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
        held._opt_called = True
        return own_step(held, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    optimizer.step = step  # type: ignore[method-assign]
