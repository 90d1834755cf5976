"""The one seam between the public operations and what runs them."""

from typing import Protocol

import torch
from torch import Tensor

from worker.kernels import reference


class Kernels(Protocol):
    """What a module with a device's kernels provides; `reference.py` says what each returns, bit for bit."""

    def compute_amax(self, x: Tensor, granularity: str, block: tuple[int, int]) -> Tensor: ...

    def encode(self, x: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor: ...

    def dequantize(self, codes: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor: ...

    def all_finite(self, x: Tensor) -> Tensor: ...

    def sqrt(self, x: Tensor) -> Tensor: ...

    def matmul(self, a_MK: Tensor, a_dequant_scale: Tensor, b_NK: Tensor, b_dequant_scale: Tensor) -> Tensor: ...


def implementation(device: torch.device) -> Kernels:
    """The kernels of a device: the plain-torch reference, until a device has kernels of its own."""
    return reference
