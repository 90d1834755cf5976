"""The passes of a linear layer whose operands have one scale each, found now: twins of the reference's `linear_*`.

The launches are those of `quantize_operand`, `requantize` and `matmul`. What they need besides tensors is settled once for
each shape (`_plan`), so the host does little in a step. Memory comes from `empty_strided`: `torch.empty` and `torch.zeros`
take several times as long, as Python's arguments first fit another of their signatures.
Shape suffixes as in worker/fp8/linear.py.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.kernels import reference
from worker.kernels.cuda import language, quantization
from worker.kernels.cuda.amax import FLAT_BLOCK as AMAX_BLOCK
from worker.kernels.cuda.amax import FLAT_BLOCKS_PER_PROGRAM
from worker.kernels.cuda.amax import launch_flat as launch_amax
from worker.kernels.cuda.gemm import product_of_tensors
from worker.kernels.cuda.launching import MOST_KNOWN, PreparedLaunch
from worker.kernels.cuda.quantization import FLAT_BLOCK, SHARED_SCALE_TILE, launch_flat, launch_tile
from worker.kernels.cuda.rescale import FORMAT_NAMES
from worker.kernels.cuda.transpose import transpose
from worker.kernels.formats import E4M3
from worker.kernels.scales import ScaleKind

_FP32 = torch.float32
_empty = torch.empty_strided
_Layout = tuple[tuple[int, ...], tuple[int, ...]]


class _Plan(NamedTuple):
    """How to quantize a contiguous matrix of one shape and dtype.

    sides: see `quantize_operand`. rows, columns: sizes and strides of the codes for its rows and its columns.
    """

    find_amax: PreparedLaunch
    encode: PreparedLaunch
    sides: str
    rows: _Layout
    columns: _Layout


def _contiguous(shape: tuple[int, ...], *, transposed: bool = False) -> _Layout:
    """Sizes and strides of a tensor, or of the transposed view of a matrix."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return (shape[::-1], strides[::-1]) if transposed else (shape, strides)


@lru_cache(MOST_KNOWN)
def _plan(
    shape: torch.Size,
    _dtype: torch.dtype,
    codes_dtype: torch.dtype,
    margin: int,
    sides: str,
    activation: str | None,
    has_unit: bool,
    marks_nonfinite: bool = False,
    is_second: bool = False,
    in_window: bool = False,
    tracks_amax: bool = False,
) -> _Plan:
    """is_second: codes are views (summed, N), as the second operand of a product is wanted.

    in_window: the amax is not looked for where a bool () says so. tracks_amax: the codes' launch finds it too.
    """
    num_elements = shape.numel()
    layouts = _contiguous(tuple(shape), transposed=is_second), _contiguous(tuple(shape[::-1]), transposed=is_second)
    find_amax = PreparedLaunch(
        launch_amax, language.cdiv(num_elements, AMAX_BLOCK * FLAT_BLOCKS_PER_PROGRAM),
        num_elements, in_window, activation, AMAX_BLOCK, FLAT_BLOCKS_PER_PROGRAM, num_given=1,
    )  # fmt: skip
    name = FORMAT_NAMES[codes_dtype]
    if sides == "rows":
        encode = PreparedLaunch(
            launch_flat, language.cdiv(num_elements, FLAT_BLOCK),
            num_elements, name, activation, margin, has_unit, marks_nonfinite, tracks_amax, FLAT_BLOCK,
            num_given=6 if tracks_amax else 3,
        )  # fmt: skip
        return _Plan(find_amax, encode, sides, *layouts)
    (num_rows, num_columns), (tile_m, tile_n) = shape, SHARED_SCALE_TILE
    encode = PreparedLaunch(
        launch_tile, language.cdiv(num_rows, tile_m) * language.cdiv(num_columns, tile_n),
        num_columns, num_rows, num_columns, 0, 0, 0, 0, ScaleKind.TENSOR.value, name, activation, margin,
        sides == "both", True, has_unit, tracks_amax, tile_m, tile_n, num_given=5 if tracks_amax else 4,
    )  # fmt: skip
    return _Plan(find_amax, encode, sides, *layouts)


def _find_amax(x: Tensor, plan: _Plan, unless: Tensor | None = None) -> Tensor:
    """unless: a bool (), on which x is not looked through, and the result is 0."""
    amax = _empty((), (), dtype=_FP32, device=x.device).zero_()
    plan.find_amax(x, amax, unless)
    return amax


def _encode(
    x: Tensor,
    plan: _Plan,
    dtype: torch.dtype,
    amax: Tensor,
    unit: Tensor | None = None,
    column_scale: Tensor | None = None,
    new_amax: Tensor | None = None,
) -> list[Tensor]:
    """The codes that the plan makes, for products over rows before those over columns, and the scale () that they share.

    column_scale: is written too, with the same number. new_amax: is raised to the amax of x.
    """
    _, encode, sides, rows, columns = plan
    device = x.device
    scale = _empty((), (), dtype=_FP32, device=device)
    if sides == "rows":
        codes = _empty(*rows, dtype=dtype, device=device)
        encode(x, amax, unit, codes, scale, new_amax)
        return [codes, scale]
    codes_t = _empty(*columns, dtype=dtype, device=device)
    column_scale = scale if column_scale is None else column_scale
    if sides == "columns":
        encode(x, amax, None, unit, new_amax, None, scale, codes_t, column_scale)
        return [codes_t, scale]
    codes = _empty(*rows, dtype=dtype, device=device)
    encode(x, amax, None, unit, new_amax, codes, scale, codes_t, column_scale)
    return [codes, codes_t, scale]


def _weight_operand(
    weight_NK: Tensor, unit: Tensor | None, amax: Tensor | None, dtype: torch.dtype, margin: int, side: str
) -> list[Tensor]:
    """Codes as the second operand of a product, and their scale: a view (K, N) of (N, K), or for the "columns" the reverse."""
    if unit is not None and weight_NK.dtype == E4M3.dtype:
        return [(weight_NK if side == "rows" else transpose(weight_NK)).t(), unit]
    plan = _plan(weight_NK.shape, weight_NK.dtype, dtype, margin, side, None, unit is not None, False, True)
    return _encode(weight_NK, plan, dtype, _find_amax(weight_NK, plan) if amax is None else amax, unit)


def linear_output(
    x_TK: Tensor, weight_NK: Tensor, unit: Tensor | None, weight_amax: Tensor | None, *formats: Any
) -> list[Tensor]:
    """See the reference. Three launches and a product; fewer where amaxes are known or the weight is held in FP8."""
    input_dtype, weight_dtype, margin, activation, sides, out_dtype, input_amax, keeps_rows = (*formats, None, False)[:8]
    x_TK, weight_NK = x_TK.contiguous(), weight_NK.contiguous()
    plan = _plan(x_TK.shape, x_TK.dtype, input_dtype, margin, sides, activation, False)
    amax = _find_amax(x_TK, plan) if input_amax is None else input_amax
    codes, *kept, scale = _encode(x_TK, plan, input_dtype, amax)
    weight, weight_scale = _weight_operand(weight_NK, unit, weight_amax, weight_dtype, margin, "rows")
    output_TN = product_of_tensors(codes, scale, weight, weight_scale, out_dtype, True)
    if activation is not None:
        return [output_TN, amax if input_amax is None else amax.clone()]
    if keeps_rows:
        return [output_TN, codes, *kept, scale]
    return [output_TN, *kept, scale] if kept else [output_TN]


def linear_product(
    codes_TK: Tensor, scale: Tensor, weight_NK: Tensor, unit: Tensor | None, weight_amax: Tensor | None, *formats: Any
) -> Tensor:
    """See the reference. One launch and a product; the product alone, where the weight is held in FP8."""
    weight_dtype, margin, out_dtype = formats
    weight, weight_scale = _weight_operand(weight_NK.contiguous(), unit, weight_amax, weight_dtype, margin, "rows")
    return product_of_tensors(codes_TK.contiguous(), scale, weight, weight_scale, out_dtype, True)


def quantize_operand(x_MN: Tensor, *how: Any) -> list[Tensor]:
    """As `quantization.quantize_operand`. An amax that is known and used takes one launch, settled as those of a layer."""
    dtype, kind, margin, sides, amax, uses_amax = (*how, None, None)[:6]
    is_settled = amax is not None and uses_amax is None and kind is ScaleKind.TENSOR and x_MN.is_contiguous()
    if not is_settled or not x_MN.numel():
        return quantization.quantize_operand(x_MN, *how)
    plan = _plan(x_MN.shape, x_MN.dtype, dtype, margin, sides, None, False)
    if sides != "both":
        return _encode(x_MN, plan, dtype, amax)
    column_scale = _empty((), (), dtype=_FP32, device=x_MN.device)  # an op's results share no memory
    codes, codes_t, scale = _encode(x_MN, plan, dtype, amax, column_scale=column_scale)
    return [codes, scale, codes_t, column_scale]


def quantize_delayed(x_MN: Tensor, step_amax: Tensor, window_amax: Tensor, num_finite_steps: Tensor, *how: Any) -> list[Tensor]:
    """See the reference. Two launches, the first of which reads nothing once the window is full; one, of a known amax."""
    if x_MN.numel() == 0:
        return reference.quantize_delayed(x_MN, step_amax, window_amax, num_finite_steps, *how)
    amax, dtype, history_length, margin, sides, activation, remembers = how
    x_MN, is_known = x_MN.contiguous(), amax is not None
    plan = _plan(
        x_MN.shape, x_MN.dtype, dtype, margin, sides, activation, False, in_window=True, tracks_amax=remembers and not is_known
    )
    is_full = num_finite_steps >= history_length
    if is_known and remembers:
        torch.maximum(step_amax, amax, out=step_amax)
    amax = torch.where(is_full, window_amax, amax if is_known else _find_amax(x_MN, plan, is_full))
    return [*_encode(x_MN, plan, dtype, amax, new_amax=step_amax if remembers and not is_known else None), amax]


def linear_gradients(
    grad_output_TN: Tensor,
    grad_amax: Tensor | None,
    input: Tensor | None,
    input_scale: Tensor | None,
    weight_NK: Tensor,
    unit: Tensor | None,
    weight_amax: Tensor | None,
    *formats: Any,
) -> list[Tensor]:
    """See the reference. Three launches and two products; fewer where the amax is known, more after an activation."""
    input_dtype, weight_dtype, grad_dtype, margin, activation, sides, grad_input_dtype, grad_weight_dtype = formats
    grad_output_TN, weight_NK = grad_output_TN.contiguous(), weight_NK.contiguous()
    plan = _plan(grad_output_TN.shape, grad_output_TN.dtype, grad_dtype, margin, sides, None, False)
    grad_amax = _find_amax(grad_output_TN, plan) if grad_amax is None else grad_amax
    *codes, scale = _encode(grad_output_TN, plan, grad_dtype, grad_amax)
    gradients = []
    if sides != "columns":
        weight, weight_scale = _weight_operand(weight_NK, unit, weight_amax, weight_dtype, margin, "columns")
        gradients.append(product_of_tensors(codes[0], scale, weight, weight_scale, grad_input_dtype, False))
    if sides != "rows":
        assert input is not None
        assert input_scale is not None
        if activation is not None:  # what was kept with the activation's input is its amax
            input = input.contiguous()
            again = _plan(input.shape, input.dtype, input_dtype, margin, "columns", activation, False, False, True)
            second, input_scale = _encode(input, again, input_dtype, input_scale)
        else:
            second = input.t()
        gradients.append(product_of_tensors(codes[-1], scale, second, input_scale, grad_weight_dtype, False))
    return gradients


def quantize_gradient(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See the reference. Two launches."""
    if x.numel() == 0:
        return reference.quantize_gradient(x, dtype)
    flat = x.contiguous()
    plan = _plan(flat.shape, flat.dtype, dtype, 0, "rows", None, False, True)
    codes, dequant_scale = _encode(flat, plan, dtype, _find_amax(flat, plan))
    return codes, dequant_scale
