"""Keep tensors that a recorded step reads by address alive as long as the recording.

A CUDA graph holds addresses and no tensors: a table that the host sent to a kernel has to outlive
each replay, and so has the pinned memory that a captured copy reads. Our recordings collect these
tensors by `holding`. For captures that users make with `torch.cuda.graph`, they are kept until the
process ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_HOLDERS: list[list[Tensor]] = []
_KEPT: list[Tensor] = []


@contextmanager
def holding() -> Iterator[list[Tensor]]:
    """Collect in a list the tensors that are held inside. The recording keeps the list."""
    held: list[Tensor] = []
    _HOLDERS.append(held)
    try:
        yield held
    finally:
        _HOLDERS.pop()


def hold(*tensors: Tensor) -> None:
    """Keep tensors for the recording under way, if there is one. The first is on the device of the recording."""
    if _HOLDERS:
        _HOLDERS[-1].extend(tensors)
    elif tensors[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _KEPT.extend(tensors)
