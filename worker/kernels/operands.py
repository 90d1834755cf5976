"""Quantize a matrix, or an activation of it, as an operand of products, over its rows, its columns or both: check, op, fake."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octet.worker.kernels.activations import ACTIVATIONS
from octet.worker.kernels.library import define
from octet.worker.kernels.quantization import check_scaled_dtype
from octet.worker.kernels.scales import ScaledCodes, ScaleKind, empty_operand_scale

SIDES = ("rows", "columns", "both")


class QuantizedOperand(NamedTuple):
    """A matrix in codes, for products over its rows and over its columns; None for what was not asked for.

    rows: of the matrix (M, N). columns: of the transposed matrix (N, M). amax: of all of it, fp32 (), where it was found.
    """

    rows: ScaledCodes | None
    columns: ScaledCodes | None
    amax: Tensor | None


class Scaling(NamedTuple):
    """The keyword arguments of `quantize_operand`, with its defaults."""

    margin: int = 0
    sides: str = "rows"
    amax: Tensor | None = None
    uses_amax: Tensor | None = None


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


def _fake_activated(
    x: Tensor,
    _activation: str,
    dtype: torch.dtype,
    kind: ScaleKind,
    margin: int,
    sides: str,
    amax: Tensor | None,
    uses_amax: Tensor | None,
    _after: Tensor | None,
) -> list[Tensor]:
    finds_amax = kind is ScaleKind.TENSOR and amax is None
    operand = _fake_operand(x, dtype, kind, margin, sides, amax, uses_amax)
    return [*operand, *([x.new_empty((), dtype=torch.float32)] if finds_amax else [])]


_activate_op = define(
    "activate_operand(Tensor x, str activation, ScalarType dtype, Kind kind, int margin, str sides, Tensor? amax, "
    "Tensor? uses_amax, Tensor? after) -> Tensor[]",
    _fake_activated,
)


def _fake_delayed(
    x: Tensor, _step_amax: Tensor, _window_amax: Tensor, _num_finite: Tensor, _amax: Tensor | None, *settings: Any
) -> list[Tensor]:
    dtype, _, margin, sides, *_ = settings
    parts = _fake_operand(x, dtype, ScaleKind.TENSOR, margin, sides, None, None)
    return [*parts, x.new_empty((), dtype=torch.float32)]


_delayed_op = define(
    "quantize_delayed(Tensor x, Tensor(a!) step_amax, Tensor window_amax, Tensor num_finite_steps, Tensor? amax, "
    "ScalarType dtype, int history_length, int margin, str sides, str? activation, bool remembers) -> Tensor[]",
    _fake_delayed,
)


class Window(NamedTuple):
    """The state of delayed scaling for one operand. step_amax, window_amax: fp32 (). num_finite_steps: int64 ().

    The window counts once num_finite_steps reaches history_length. If `remembers`, step_amax
    collects the largest amax of a step.
    """

    step_amax: Tensor
    window_amax: Tensor
    num_finite_steps: Tensor
    history_length: int
    margin: int
    remembers: bool


def quantize_delayed(
    x_MN: Tensor,
    window: Window,
    dtype: torch.dtype,
    *,
    sides: str = "rows",
    activation: str | None = None,
    amax: Tensor | None = None,
) -> QuantizedOperand:
    """Return codes of x (M, N), or of an activation of x, by the window's amax, or by its own until the window is full.

    They are those of `quantize_operand` and `activate_operand`. amax: fp32 (), x's own, where it is
    known. The amax of the result is the one that codes are scaled by. Autograd does not follow it.
    """
    _check(x_MN, dtype, ScaleKind.TENSOR, sides, amax)
    *tensors, length, margin, remembers = window
    parts = _delayed_op(x_MN, *tensors, amax, dtype, length, margin, sides, activation, remembers)
    return _named(parts, ScaleKind.TENSOR, sides, has_amax=True)


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
    _check(x_MN, dtype, kind, sides, amax)
    parts = _operand_op(x_MN.detach(), dtype, kind, margin, sides, amax, uses_amax)
    return _named(parts, kind, sides, has_amax=uses_amax is not None)


def activate_operand(
    x_MN: Tensor,
    activation: str,
    dtype: torch.dtype,
    kind: ScaleKind,
    scaling: Scaling,
    *,
    after: Tensor | None = None,
) -> QuantizedOperand:
    """An activation of x (M, N), one of ACTIVATIONS, quantized as by `quantize_operand`; its values are not written.

    Amaxes are those of the activation's values, which are rounded to the dtype of x. Where none was given for a scale of the
    tensor, the one found is returned. after: a tensor that a compiler may not put this before, where the result is made a
    second time in the backward pass. Autograd does not follow it.
    """
    margin, sides, amax, uses_amax = scaling
    _check(x_MN, dtype, kind, sides, amax)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}.")
    parts = _activate_op(x_MN, activation, dtype, kind, margin, sides, amax, uses_amax, after)
    finds_amax = kind is ScaleKind.TENSOR and amax is None
    return _named(parts, kind, sides, has_amax=finds_amax or uses_amax is not None)


def _check(x_MN: Tensor, dtype: torch.dtype, kind: ScaleKind, sides: str, amax: Tensor | None) -> None:
    check_scaled_dtype(dtype)
    if x_MN.ndim != 2:
        raise ValueError(f"an operand of a product is a matrix; x has shape {tuple(x_MN.shape)}. Reshape it to (M, N).")
    if sides not in SIDES:
        raise ValueError(f"sides is {sides!r}; allowed: {', '.join(SIDES)}.")
    if amax is not None and kind is not ScaleKind.TENSOR:
        raise ValueError(f"an amax is given for one scale of the tensor; kind is {kind.value}. Use tensor, or give no amax.")


def _named(parts: list[Tensor], kind: ScaleKind, sides: str, *, has_amax: bool) -> QuantizedOperand:
    rows = ScaledCodes(parts[0], parts[1], kind) if sides != "columns" else None
    first = 2 if sides == "both" else 0
    columns = ScaledCodes(parts[first], parts[first + 1], kind) if sides != "rows" else None
    return QuantizedOperand(rows, columns, parts[-1] if has_amax else None)
