"""A gradient without values, which a parameter holds while the ranks hold its mean in pieces (ZeRO).

Without it the gradient would be None, and `torch.nn.utils.clip_grad_norm_(model.parameters(), …)` would clip nothing and
return 0. Every op on it is refused with what to call instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octet.worker.kernels.torch_private import disabled_torch_function, make_wrapper_subclass

_REFUSED = (
    "this gradient is divided over the ranks (ZeRO): no rank holds it. Allowed: Parallel.clip_grad_norm_(max_norm) in place of "
    "torch.nn.utils.clip_grad_norm_; optimizer.step() or optimizer.zero_grad() before another backward pass. Use no_sync for "
    "all micro-batches but the last."
)


class ShardedGrad(Tensor):
    """Presents as a gradient of a shape and holds no values. Every op raises ValueError."""

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> "ShardedGrad":
        made: ShardedGrad = make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGrad(shape={tuple(self.shape)}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return no tensors, so that it counts no bytes."""
        return [], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: None, size: torch.Size, stride: tuple[int, ...]) -> "ShardedGrad":
        raise ValueError(_REFUSED)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # by which torch hands a gradient on without reading it
            return args[0]
        raise ValueError(_REFUSED)
