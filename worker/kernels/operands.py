"""Quantize a matrix as an operand of products, over its rows, its columns or both: check, op and fake."""

from typing import NamedTuple

import torch
from torch import Tensor

from worker.kernels.library import define
from worker.kernels.quantization import check_scaled_dtype
from worker.kernels.scales import ScaledCodes, ScaleKind, empty_operand_scale

SIDES = ("rows", "columns", "both")


class QuantizedOperand(NamedTuple):
    """A matrix in codes, for products over its rows and over its columns; None for what was not asked for.

    rows: of the matrix (M, N). columns: of the transposed matrix (N, M). amax: of all of it, fp32 ().
    """

    rows: ScaledCodes | None
    columns: ScaledCodes | None
    amax: Tensor | None


def _fake_operand(
    x: Tensor, dtype: torch.dtype, kind: ScaleKind, margin: int, sides: str, amax: Tensor | None, uses_amax: Tensor | None
) -> list[Tensor]:
    parts = []
    for side, shape in (("rows", x.shape), ("columns", x.shape[::-1])):
        if sides in (side, "both"):
            parts += [x.new_empty(shape, dtype=dtype), empty_operand_scale(torch.Size(shape), kind, x.device)]
    return parts if uses_amax is None else [*parts, x.new_empty((), dtype=torch.float32)]


_operand_op = define(
    "quantize_operand(Tensor x, ScalarType dtype, Kind kind, int margin, str sides, Tensor? amax, Tensor? uses_amax) "
    "-> Tensor[]",
    _fake_operand,
)


def quantize_operand(
    x_MN: Tensor,
    dtype: torch.dtype,
    kind: ScaleKind = ScaleKind.TENSOR,
    *,
    margin: int = 0,
    sides: str = "rows",
    amax: Tensor | None = None,
    uses_amax: Tensor | None = None,
) -> QuantizedOperand:
    """x (M, N), a matrix, quantized for products over its "rows", over its "columns", or "both", from one read of x.

    Codes are contiguous and scales laid out as a GEMM takes them.
    amax: fp32 (), to scale by, for a scale of the tensor; x is then not looked through. uses_amax: a bool (), whether to
    scale by it or by x's own amax, which is returned in either case.
    """
    check_scaled_dtype(dtype)
    if x_MN.ndim != 2:
        raise ValueError(f"an operand of a product is a matrix; x has shape {tuple(x_MN.shape)}. Reshape it to (M, N).")
    if sides not in SIDES:
        raise ValueError(f"sides is {sides!r}; allowed: {', '.join(SIDES)}.")
    if amax is not None and kind is not ScaleKind.TENSOR:
        raise ValueError(f"an amax is given for one scale of the tensor; kind is {kind.value}. Use tensor, or give no amax.")
    parts: list[Tensor] = _operand_op(x_MN.detach(), dtype, kind, margin, sides, amax, uses_amax)
    rows = ScaledCodes(parts[0], parts[1], kind) if sides != "columns" else None
    first = 2 if sides == "both" else 0
    columns = ScaledCodes(parts[first], parts[first + 1], kind) if sides != "rows" else None
    return QuantizedOperand(rows, columns, None if uses_amax is None else parts[-1])
