"""Send tables of addresses and numbers to a device; what it already has is not sent again."""

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from octet.worker.kernels.held import hold

_SENT: dict[tuple[str, torch.device], tuple[list[Any], Tensor]] = {}
"""The tensor last sent under a name to a device, and its content; it is sent again only when the content has changed."""


def send(
    name: str, content: list[Any], device: torch.device, dtype: torch.dtype, rows: Callable[[list[Any]], list[Any]] = list
) -> Tensor:
    """Return the rows made of a content, on the device. The host does not wait."""
    known = _SENT.get((name, device))
    if known is not None and known[0] == content:
        hold(known[1])
        return known[1]
    host = torch.tensor(rows(content), dtype=dtype, pin_memory=device.type == "cuda")
    on_device = host.to(device, non_blocking=True)
    hold(on_device, host)
    if type(on_device) is Tensor:  # a fake one belongs to its mode
        _SENT[name, device] = (content, on_device)
    return on_device


def chunk_rows(num_chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return a row of each chunk of many tensors: its tensor's index, and its own within that tensor."""
    tensors = chain.from_iterable(map(repeat, range(len(num_chunks)), num_chunks))
    return [*zip(tensors, chain.from_iterable(map(range, num_chunks)), strict=True)]  # a million of them in a large model
