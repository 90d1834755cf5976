"""Move and cast a converted model: `.half()`, `.to(dtype)`, `.cuda()` and the like.

Plain values follow. Codes, and what layers remember of scales, move to another device and keep their dtype
(`Float8Linear`, `OperandScaling`). A cast that no step could train is refused before anything has changed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.fp8.weight import is_float8_weight

Change = Callable[[Tensor], Tensor]
"""The argument of `nn.Module._apply`: makes the tensor that takes a tensor's place."""

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that plain parameters of a converted model may have."""


class KeepsDtypes(nn.Module):
    """A module whose own tensors keep their dtypes."""

    def _apply(self, fn: Change, recurse: bool = True) -> Any:
        return super()._apply(lambda tensor: moved(tensor, fn), recurse)


class GuardedApply:
    """Takes the place of one module's `_apply`: checks the whole tree before its first leaf is changed."""

    def __init__(self, module: nn.Module, keep: Iterable[str] = ()) -> None:
        """keep: names of the module's own buffers that keep their dtype."""
        self.module, self.keep = module, frozenset(keep)

    def __call__(self, fn: Change, recurse: bool = True) -> nn.Module:
        check_cast(self.module, fn)
        kept = {id(self.module._buffers[name]) for name in self.keep}
        return type(self.module)._apply(
            self.module, lambda tensor: moved(tensor, fn) if id(tensor) in kept else fn(tensor), recurse
        )


def guard_casts(model: nn.Module, keep: Iterable[str] = ()) -> None:
    """Check casts of a model and of each part that holds others before they change anything.

    keep: names of the model's own buffers that keep their dtype.
    """
    model._apply = GuardedApply(model, keep)  # type: ignore[method-assign]
    for module in model.modules():
        if module is not model and any(True for _ in module.children()):
            module._apply = GuardedApply(module)  # type: ignore[method-assign]


def check_cast(module: nn.Module, fn: Change) -> None:
    """Raise ValueError if `fn` gives a plain parameter of the module a dtype that no step could train."""
    plain = (parameter for parameter in module.parameters() if not is_float8_weight(parameter))
    kinds = {(parameter.dtype, parameter.device) for parameter in plain}
    for dtype, device in kinds:
        result = fn(torch.empty(0, dtype=dtype, device=device)).dtype
        if result != dtype and result not in TRAINABLE_DTYPES:
            raise ValueError(
                f"the model was initialized at a precision level and cannot be cast to {result}; allowed: "
                f"{', '.join(map(str, TRAINABLE_DTYPES))}. Nothing was changed. Cast the model before "
                "initialize."
            )


def moved(tensor: Tensor, fn: Change) -> Tensor:
    """Apply what a change does apart from the dtype."""
    changed = fn(tensor)
    return changed if changed.dtype == tensor.dtype else tensor.to(changed.device)
