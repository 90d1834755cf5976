"""Codes that are written in the pass that writes the values, at a scale that is known before: check, op and fake.

Delayed scaling knows it, but does not use it while its window fills, and only the device knows whether it does. So `complete`
finishes the codes afterwards: it makes the transposed ones of them, or makes all again, of the values, at their own amax.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octet.worker.kernels.library import define
from octet.worker.kernels.operands import QuantizedOperand
from octet.worker.kernels.scales import ScaledCodes, ScaleKind


class KnownScale(NamedTuple):
    """How to write codes with values. amax: fp32 (), to scale by. uses_amax: a bool (), whether to; else none are written."""

    dtype: torch.dtype
    margin: int
    amax: Tensor
    uses_amax: Tensor


def _fake_complete(
    codes: Tensor, x: Tensor, _own: Tensor, _margin: int, _amax: Tensor, _uses_amax: Tensor, columns: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty((), dtype=torch.float32), codes.new_empty(codes.shape[::-1] if columns else 0)


_complete_op = define(
    "complete(Tensor(a!) codes, Tensor x, Tensor own_amax, int margin, Tensor amax, Tensor uses_amax, bool columns) "
    "-> (Tensor, Tensor)",
    _fake_complete,
)


def complete(codes_MN: Tensor, x_MN: Tensor, own_amax: Tensor, known_scale: KnownScale, *, columns: bool) -> QuantizedOperand:
    """What `quantize_operand` makes of x (M, N) by the amax or by its own: codes that were written with x, changed in place.

    x and codes are contiguous. own_amax: of x, fp32 (). columns: whether codes of x.T are wanted, too.
    """
    if x_MN.ndim != 2 or codes_MN.shape != x_MN.shape or codes_MN.dtype != known_scale.dtype:
        got = f"codes {tuple(codes_MN.shape)} of {codes_MN.dtype} for x {tuple(x_MN.shape)}"
        raise ValueError(f"{got}; allowed: a matrix and its codes in {known_scale.dtype}. Pass what was written with x.")
    x, how = x_MN.detach(), (known_scale.margin, known_scale.amax, known_scale.uses_amax)
    scale, codes_t = _complete_op(codes_MN, x, own_amax, *how, columns)
    rows = ScaledCodes(codes_MN, scale, ScaleKind.TENSOR)
    return QuantizedOperand(rows, ScaledCodes(codes_t, scale, ScaleKind.TENSOR) if columns else None, own_amax)
