"""Tensors whose memory comes later: they have shape, dtype, device and views, and a storage of 0 bytes.

A model that is built of such parameters is converted and divided over ranks before any value exists. Unlike tensors on `meta`
they are on their device, and keep their identity when they get memory: `allocate` fills the storage that all views see.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def deferred(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a contiguous tensor without memory. Its values must not be read."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def is_deferred(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory yet."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def allocate(tensor: Tensor) -> Tensor:
    """Give a deferred tensor, and all views of it, their memory. Returns it. What it holds is undefined."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    return tensor


@contextmanager
def sliceable(tensor: Tensor) -> Iterator[Tensor]:
    """Inside, parts of a deferred tensor can be viewed, which torch refuses of an empty storage."""
    is_lent = is_deferred(tensor)
    if is_lent:
        allocate(tensor)
    try:
        yield tensor
    finally:
        if is_lent:
            tensor.untyped_storage().resize_(0)


def defer_parameters(model: nn.Module, device: torch.device) -> None:
    """Put parameters without memory on `device` in the place of a model's parameters on `meta`. Ties stay."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.device.type != "meta":
                continue
            if parameter not in made:
                held = deferred(tuple(parameter.shape), parameter.dtype, device)
                made[parameter] = nn.Parameter(held, requires_grad=parameter.requires_grad)
            setattr(module, name, made[parameter])


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move a model's buffers, which have values, to the device. Raises ValueError for one on `meta`."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                raise ValueError(
                    f"buffer {name} of {type(module).__name__} has no values; allowed: buffers off meta. Let `build` "
                    "make the model without a device of its own."
                )
            module._buffers[name] = buffer.to(device)
