"""Count what a rank gives to all-gathers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor


@contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """Collect the bytes that this rank gives to each all-gather."""
    sent: list[int] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # since torch 2.13
    original = getattr(dist, name)

    def counting(output: Tensor, input: Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(input.nbytes)
        return original(output, input, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, counting)
        yield sent
