"""What a parameter of the model holds as its gradient while its owners hold the mean in pieces: nothing that may be read.

Without it the gradient would be None, and `torch.nn.utils.clip_grad_norm_(model.parameters(), …)` would clip nothing and
return 0. So whatever reads or changes it is refused, with what to call.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_REFUSED = (
    "this gradient is divided over the ranks (ZeRO): no rank holds it. Allowed: Parallel.clip_grad_norm_(max_norm) in place of "
    "torch.nn.utils.clip_grad_norm_; optimizer.step() or optimizer.zero_grad() before another backward pass. Use no_sync for "
    "all micro-batches but the last."
)


class DividedGradient(Tensor):
    """Presents as a gradient of a shape and holds no values. Every op raises ValueError."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> "DividedGradient":
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DividedGradient(shape={tuple(self.shape)}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Say that it consists of no tensors, so that it counts no bytes."""
        return [], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: None, size: torch.Size, stride: tuple[int, ...]) -> "DividedGradient":
        raise ValueError(_REFUSED)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # by which torch hands a gradient on without reading it
            return args[0]
        raise ValueError(_REFUSED)
