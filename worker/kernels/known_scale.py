"""Write codes in the pass that writes the values, at a scale that is known before: check, op and fake.

Delayed scaling has such a scale, but does not use it while its window fills, and only the device
knows whether the window is full. So `complete` finishes the codes afterwards: it transposes them,
or makes all of them again from the values, scaled by their own amax.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octet.worker.kernels.library import define
from octet.worker.kernels.operands import QuantizedOperand
from octet.worker.kernels.scales import ScaledCodes, ScaleKind


class KnownScale(NamedTuple):
    """The scale for writing codes with values. amax: fp32 (), to scale by. uses_amax: a bool (); if false, none are written."""

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
    """Return x (M, N) as `quantize_operand` does, from codes that were written with x; they are changed in place.

    The codes are scaled by the amax of known_scale, or by own_amax while that is not used. x and
    codes are contiguous. own_amax: of x, fp32 (). columns: codes of x.T are wanted, too.
    """
    if x_MN.ndim != 2 or codes_MN.shape != x_MN.shape or codes_MN.dtype != known_scale.dtype:
        got = f"codes {tuple(codes_MN.shape)} of {codes_MN.dtype} for x {tuple(x_MN.shape)}"
        raise ValueError(f"{got}; allowed: a matrix and its codes in {known_scale.dtype}. Pass what was written with x.")
    margin, amax, uses_amax = known_scale.margin, known_scale.amax, known_scale.uses_amax
    scale, codes_t = _complete_op(codes_MN, x_MN.detach(), own_amax, margin, amax, uses_amax, columns)
    rows = ScaledCodes(codes_MN, scale, ScaleKind.TENSOR)
    return QuantizedOperand(rows, ScaledCodes(codes_t, scale, ScaleKind.TENSOR) if columns else None, own_amax)
