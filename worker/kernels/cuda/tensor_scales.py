"""Quantize matrices that have one scale each: twins of `reference.quantize_operand`, `requantize` and those by windows.

The kernels are those of `amax.py` and `quantization.py`, which also has the other kinds of scales. What a launch needs
besides tensors is settled once for each shape (`_plan`), so the host does little in a step. Memory comes from
`empty_strided`: `torch.empty` and `torch.zeros` take several times as long, as Python's arguments first fit another of
their signatures. Without settled launches an eager O2 step of a GPT takes the host 14 % longer, without `empty_strided`
12 % (docs/log.md).
Shape suffixes: M rows, N columns.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octet.worker.kernels import reference
from octet.worker.kernels.cuda import language, quantization
from octet.worker.kernels.cuda.amax import flat_blocks
from octet.worker.kernels.cuda.amax import launch_flat as launch_amax
from octet.worker.kernels.cuda.launching import MOST_KNOWN, Layout, PreparedLaunch, contiguous_layout
from octet.worker.kernels.cuda.quantization import FLAT_BLOCK, SHARED_SCALE_TILE, launch_flat, tile_launcher
from octet.worker.kernels.cuda.rescale import FORMAT_NAMES
from octet.worker.kernels.scales import ScaledCodes, ScaleKind

_FP32 = torch.float32
_empty, _empty_like = torch.empty_strided, torch.empty_like


class _Plan(NamedTuple):
    """The prepared launches that quantize a contiguous matrix of one shape and dtype.

    sides: see `quantize_operand`. rows, columns: sizes and strides of the codes for its rows and its columns.
    """

    find_amax: PreparedLaunch
    encode: PreparedLaunch
    sides: str
    rows: Layout
    columns: Layout


@lru_cache(MOST_KNOWN)
def _plan(
    shape: torch.Size,
    _dtype: torch.dtype,
    codes_dtype: torch.dtype,
    margin: int,
    sides: str,
    activation: str | None,
    is_stored: bool,
    marks_nonfinite: bool = False,
    in_window: bool = False,
    tracks_amax: bool = False,
) -> _Plan:
    """is_stored: the matrix consists of codes with a scale.

    in_window: a bool () can skip the search for the amax. tracks_amax: the launch that writes codes
    also finds the amax.
    """
    num_elements = shape.numel()
    layouts = contiguous_layout(tuple(shape)), contiguous_layout(tuple(shape[::-1]))
    amax_block, num_blocks = flat_blocks(activation)
    find_amax = PreparedLaunch(
        launch_amax, language.cdiv(num_elements, amax_block * num_blocks),
        num_elements, in_window, activation, amax_block, num_blocks, num_given=1,
    )  # fmt: skip
    name = FORMAT_NAMES[codes_dtype]
    if sides == "rows":
        encode = PreparedLaunch(
            launch_flat, language.cdiv(num_elements, FLAT_BLOCK),
            num_elements, name, activation, margin, is_stored, marks_nonfinite, tracks_amax, FLAT_BLOCK,
            num_given=1,
        )  # fmt: skip
        return _Plan(find_amax, encode, sides, *layouts)
    (num_rows, num_columns), (tile_m, tile_n) = shape, SHARED_SCALE_TILE
    encode = PreparedLaunch(
        tile_launcher(activation), language.cdiv(num_rows, tile_m) * language.cdiv(num_columns, tile_n),
        num_columns, num_rows, num_columns, 0, 0, 0, 0, ScaleKind.TENSOR.value, name, activation, margin,
        sides == "both", True, is_stored, tracks_amax, tile_m, tile_n, num_given=1,
    )  # fmt: skip
    return _Plan(find_amax, encode, sides, *layouts)


def _find_amax(x: Tensor, plan: _Plan, unless: Tensor | None = None) -> Tensor:
    """Return the amax of x, fp32 (). unless: a bool (); if it is true, x is not read and the result is 0."""
    amax = _empty((), (), dtype=_FP32, device=x.device).zero_()
    plan.find_amax(x, amax, unless)
    return amax


def _encode(
    x: Tensor,
    plan: _Plan,
    dtype: torch.dtype,
    amax: Tensor,
    stored_scale: Tensor | None = None,
    new_amax: Tensor | None = None,
) -> list[Tensor]:
    """Return the tensors of `quantize_operand`. new_amax: is raised to the amax of x."""
    _, encode, sides, rows, columns = plan
    device = x.device
    scale = _empty_like(amax)
    if sides == "rows":
        codes = _empty(*rows, dtype=dtype, device=device)
        encode(x, amax, stored_scale, codes, scale, new_amax)
        return [codes, scale]
    codes_t = _empty(*columns, dtype=dtype, device=device)
    if sides == "columns":
        encode(x, amax, None, stored_scale, new_amax, None, scale, codes_t, scale)
        return [codes_t, scale]
    codes = _empty(*rows, dtype=dtype, device=device)
    column_scale = _empty_like(amax)  # an op's results share no memory
    encode(x, amax, None, stored_scale, new_amax, codes, scale, codes_t, column_scale)
    return [codes, scale, codes_t, column_scale]


def quantize_operand(
    x_MN: Tensor,
    dtype: torch.dtype,
    kind: ScaleKind,
    margin: int,
    sides: str,
    amax: Tensor | None = None,
    uses_amax: Tensor | None = None,
    activation: str | None = None,
) -> list[Tensor]:
    """See the reference. Two launches, or one if the amax is known. activation: applied to x as it is read."""
    is_settled = kind is ScaleKind.TENSOR and uses_amax is None and x_MN.is_contiguous()
    if not is_settled or not x_MN.numel():
        return quantization.quantize_operand(x_MN, dtype, kind, margin, sides, amax, uses_amax, activation)
    plan = _plan(x_MN.shape, x_MN.dtype, dtype, margin, sides, activation, False)
    return _encode(x_MN, plan, dtype, _find_amax(x_MN, plan) if amax is None else amax)


def requantize(stored: ScaledCodes, amax: Tensor, dtype: torch.dtype, margin: int, sides: str) -> list[Tensor]:
    """See the reference. One launch."""
    x_MN, stored_scale, _ = stored
    if x_MN.numel() == 0:
        return reference.requantize(stored, amax, dtype, margin, sides)
    x_MN = x_MN.contiguous()
    plan = _plan(x_MN.shape, x_MN.dtype, dtype, margin, sides, None, True)
    return _encode(x_MN, plan, dtype, amax, stored_scale)


def activate_operand(
    x_MN: Tensor,
    activation: str,
    dtype: torch.dtype,
    kind: ScaleKind,
    margin: int,
    sides: str,
    amax: Tensor | None = None,
    uses_amax: Tensor | None = None,
    _after: Tensor | None = None,
) -> list[Tensor]:
    """See the reference. The activation's result is in registers alone; where x is read twice it is computed twice."""
    if kind is not ScaleKind.TENSOR or amax is not None:
        return quantize_operand(x_MN, dtype, kind, margin, sides, amax, uses_amax, activation)
    if not x_MN.numel():
        return reference.activate_operand(x_MN, activation, dtype, kind, margin, sides, amax, uses_amax)
    x_MN = x_MN.contiguous()
    plan = _plan(x_MN.shape, x_MN.dtype, dtype, margin, sides, activation, False)
    amax = _find_amax(x_MN, plan)
    return [*_encode(x_MN, plan, dtype, amax), amax]


def quantize_delayed(
    x_MN: Tensor,
    step_amax: Tensor,
    window_amax: Tensor,
    num_finite_steps: Tensor,
    amax: Tensor | None,
    dtype: torch.dtype,
    history_length: int,
    margin: int,
    sides: str,
    activation: str | None,
    remembers: bool,
) -> list[Tensor]:
    """See the reference. Two launches; the first reads nothing once the window is full. One launch if the amax is known."""
    if x_MN.numel() == 0:
        return reference.quantize_delayed(
            x_MN,
            step_amax,
            window_amax,
            num_finite_steps,
            amax,
            dtype,
            history_length,
            margin,
            sides,
            activation,
            remembers,
        )
    x_MN = x_MN.contiguous()
    tracks_amax = remembers and amax is None
    plan = _plan(x_MN.shape, x_MN.dtype, dtype, margin, sides, activation, False, in_window=True, tracks_amax=tracks_amax)
    is_full = num_finite_steps >= history_length
    if amax is None:
        amax = _find_amax(x_MN, plan, is_full)
    elif remembers:
        torch.maximum(step_amax, amax, out=step_amax)
    amax = torch.where(is_full, window_amax, amax)
    return [*_encode(x_MN, plan, dtype, amax, new_amax=step_amax if tracks_amax else None), amax]


def quantize_gradient(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See the reference. Two launches."""
    if x.numel() == 0:
        return reference.quantize_gradient(x, dtype)
    flat = x.contiguous()
    plan = _plan(flat.shape, flat.dtype, dtype, 0, "rows", None, False, True)
    codes, dequant_scale = _encode(flat, plan, dtype, _find_amax(flat, plan))
    return codes, dequant_scale
