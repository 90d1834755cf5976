"""Casts and shapes of what a pass returns, at the cost of few calls."""

import torch
from torch import Tensor

_CASTS = {torch.float32: Tensor.float, torch.bfloat16: Tensor.bfloat16, torch.float16: Tensor.half}


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, whose arguments take Python twice as long to read as those of methods without any."""
    return _CASTS[dtype](tensor) if dtype in _CASTS else tensor.to(dtype)


def shaped(output: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A contiguous tensor that nothing else sees, in another shape: no view, which autograd lets nobody change in place.

    `resize_` takes Python a fifth of the time of `_unsafe_view`, which torch offers as an op alone. Modes that record ops are
    shown the latter: run again, `resize_` would find the tensor that autograd follows by then.
    """
    if type(output) is Tensor and not torch._C._len_torch_dispatch_stack():
        return output.resize_(shape)
    reshaped: Tensor = torch.ops.aten._unsafe_view(output, shape)
    return reshaped
