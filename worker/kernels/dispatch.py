"""The one seam between the public operations and what runs them."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from worker.kernels import reference


class Kernels(Protocol):
    """What a module with a device's kernels provides; `reference.py` says what each returns, bit for bit.

    kind: of the scales, one of `formats.KINDS`.
    """

    def compute_amax(self, x: Tensor, kind: str) -> Tensor: ...

    def quantize(self, x: Tensor, dtype: torch.dtype, kind: str, margin: int, amax: Tensor | None) -> tuple[Tensor, Tensor]: ...

    def quantize_operand(
        self,
        x_MN: Tensor,
        dtype: torch.dtype,
        kind: str,
        margin: int,
        sides: str,
        window: tuple[Tensor, Tensor | None] | None,
    ) -> list[Tensor]: ...

    def encode(self, x: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor: ...

    def dequantize(self, codes: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor: ...

    def split_dequantize(self, codes: Tensor, residual: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor: ...

    def all_finite(self, x: Tensor) -> Tensor: ...

    def sqrt(self, x: Tensor) -> Tensor: ...

    def norms(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]: ...

    def accumulate_(
        self, codes: Tensor, dequant_scale: Tensor, other: Tensor, alpha: float, draw: tuple[int, int, int]
    ) -> None: ...

    def mean_of_shards(self, codes_RS: Tensor, scales_R: Tensor) -> tuple[Tensor, Tensor]: ...

    def matmul(
        self,
        a_MK: Tensor,
        a_dequant_scale: Tensor,
        b_NK: Tensor,
        b_dequant_scale: Tensor,
        out_dtype: torch.dtype,
        fast_accumulation: bool,
    ) -> Tensor: ...


def implementation(device: torch.device) -> Kernels:
    """The kernels of a device. Triton is loaded when the first tensor on a CUDA device asks for them."""
    if device.type == "cuda":
        from worker.kernels import cuda

        return cuda
    return reference
