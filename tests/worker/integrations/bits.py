"""Compare the tensors of nested state dicts bit for bit, whatever their dtypes."""

from typing import Any

import torch
from torch import Tensor


def tensors(state: Any) -> list[Tensor]:
    """All tensors of nested dicts and lists, in order."""
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def assert_same_bits(one: Any, other: Any) -> None:
    """Fail unless both hold the same tensors, and any at all."""
    ones, others = tensors(one), tensors(other)
    assert len(ones) == len(others) > 0
    for first, second in zip(ones, others, strict=True):
        assert first.dtype == second.dtype
        assert torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))
