"""Quantize, one read of the input wherever its amax is known or lies within a tile: twins of `reference.quantize*`.

`_quantize_tile` makes codes for products over rows, transposed codes for products over columns, or both, with their scales.
The transposed store is of integers that come from selections: a maximum that propagates NaN, fed into such a store, has
corrupted its neighbours (issue 4).
Shape suffixes: M rows, N columns. The sizes below are for an H200; a tile with transposed codes or square blocks is 128×128.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels import formats, reference
from octet.worker.kernels.cuda import activations, language, mx
from octet.worker.kernels.cuda.amax import (
    MAX_ROW_BLOCK,
    ROW_TILE,
    as_matrix,
    compute_amax,
    row_and_column_amax,
    tensor_amax,
)
from octet.worker.kernels.cuda.launching import Launcher
from octet.worker.kernels.cuda.rescale import FORMAT_NAMES, encode
from octet.worker.kernels.formats import BLOCK
from octet.worker.kernels.scales import ScaledCodes, ScaleKind, empty_operand_scale, scale_shape

FLAT_BLOCK, FLAT_WARPS = 8192, 8
ROW_WARPS = 8
SHARED_SCALE_TILE = (128, 128)  # where the tile finds no scale of its own
ROWS_OF_BLOCKS = 64  # of 1×128, without transposed codes
TILE_WARPS, ERF_TILE_WARPS = 8, 16
TILE_REGISTERS = 128  # at most, of a thread: 16 warps then share a multiprocessor; Triton 3.6 takes up to 224


@triton.jit
def _last_first():
    """This program's number, counted from the end: the end of x is still in the cache where its amax was just found."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def _encode_flat(
    x,
    amax,
    stored_scale,
    codes,
    dequant_scale,
    new_amax,
    num_elements,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MARGIN: tl.constexpr,
    HAS_STORED_SCALE: tl.constexpr,
    MARKS_NONFINITE: tl.constexpr,
    TRACKS_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes at the scale of a given amax, and the amax of x itself.

    HAS_STORED_SCALE: amax and dequant_scale are of x * stored_scale. MARKS_NONFINITE: the scale is NaN where the amax is
    not finite.
    """
    program = _last_first()
    largest = tl.load(amax)
    scale = language.scale_from_amax(language.over_stored_scale(largest, stored_scale, HAS_STORED_SCALE), FORMAT, MARGIN)
    if program == 0:
        stored = language.times_stored_scale(scale, stored_scale, HAS_STORED_SCALE)
        if MARKS_NONFINITE:
            stored = tl.where(language.is_finite(largest), stored, float("nan"))
        tl.store(dequant_scale, stored)
    start = program.to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    mask = offsets < num_elements - start
    values = activations.activated(tl.load(x + start + offsets, mask=mask, other=0.0), ACTIVATION)
    encoded = language.encode_scaled(language.nan_unless_finite(values), language.inverse(scale), FORMAT)
    tl.store(codes + start + offsets, encoded, mask=mask)
    if TRACKS_AMAX:
        language.atomic_amax(new_amax, language.amax(values, 0))


@triton.jit
def _quantize_rows(
    x,
    stride,
    codes,
    dequant_scale,
    num_rows,
    num_columns,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MARGIN: tl.constexpr,
    FITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A scale for each row. A row that does not fit into a program's registers is read twice, the second time from cache."""
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row = rows < num_rows - first_row
    inputs = x + first_row * stride + rows[:, None] * stride + columns[None, :]
    outputs = codes + first_row * num_columns + rows[:, None] * num_columns + columns[None, :]
    if FITS:
        mask = is_row[:, None] & (columns[None, :] < num_columns)
        values = activations.activated(tl.load(inputs, mask=mask, other=0.0), ACTIVATION)
        scale = language.scale_from_amax(language.amax(values, 1), FORMAT, MARGIN)
        encoded = language.encode_scaled(language.nan_unless_finite(values), language.inverse(scale)[:, None], FORMAT)
        tl.store(outputs, encoded, mask=mask)
    else:
        largest = tl.zeros((ROWS,), tl.float32)
        for start in range(0, num_columns, COLUMNS):
            mask = is_row[:, None] & (columns[None, :] < num_columns - start)
            values = activations.activated(tl.load(inputs + start, mask=mask, other=0.0), ACTIVATION)
            largest = language.max_magnitude(largest, language.amax(values, 1))
        scale = language.scale_from_amax(largest, FORMAT, MARGIN)
        for start in range(0, num_columns, COLUMNS):
            mask = is_row[:, None] & (columns[None, :] < num_columns - start)
            values = activations.activated(tl.load(inputs + start, mask=mask, other=0.0), ACTIVATION)
            encoded = language.encode_scaled(language.nan_unless_finite(values), language.inverse(scale)[:, None], FORMAT)
            tl.store(outputs + start, encoded, mask=mask)
    tl.store(dequant_scale + first_row + rows, scale, mask=is_row)


# fmt: off
@triton.jit
def _quantize_tile(
    x, row_amax, column_amax, stored_scale, new_amax, codes, row_scale, codes_t, column_scale, stride, num_rows, num_columns,
    row_scale_stride_m, row_scale_stride_n, column_scale_stride_n, column_scale_stride_m,
    KIND: tl.constexpr, FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, MARGIN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_STORED_SCALE: tl.constexpr, TRACKS_AMAX: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
    # fmt: on
    """One tile of x, or of an activation of x.

    KIND: "tensor", "row", "square" or "narrow". The scales of the first two come from amaxes that are given; a square block is
    the tile, and a narrow one a row of it, or a column for codes_t.
    HAS_STORED_SCALE, of kind "tensor": amax and scales are of x * stored_scale.
    ROWS, COLUMNS: what is wanted. row_scale belongs to codes (M, N), column_scale to codes_t (N, M).
    """
    program = _last_first()
    num_column_tiles = tl.cdiv(num_columns, TILE_N)
    tile_m, tile_n = program // num_column_tiles, program % num_column_tiles
    first_row, first_column = tile_m.to(tl.int64) * TILE_M, tile_n.to(tl.int64) * TILE_N
    rows, columns = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    is_row, is_column = rows < num_rows - first_row, columns < num_columns - first_column
    mask = is_row[:, None] & is_column[None, :]
    inputs = x + first_row * stride + first_column + rows[:, None] * stride + columns[None, :]
    values = activations.activated(tl.load(inputs, mask=mask, other=0.0), ACTIVATION)
    codable = language.nan_unless_finite(values)

    if KIND == "tensor" or KIND == "square":
        if KIND == "tensor":
            amax = language.over_stored_scale(tl.load(row_amax), stored_scale, HAS_STORED_SCALE)
            scale = language.scale_from_amax(amax, FORMAT, MARGIN)
            owns_scale = program == 0
        else:
            scale = language.scale_from_amax(language.amax(language.amax(values, 1), 0), FORMAT, MARGIN)
            owns_scale = True
        stored = language.times_stored_scale(scale, stored_scale, HAS_STORED_SCALE)
        if ROWS:
            tl.store(row_scale + tile_m * row_scale_stride_m + tile_n * row_scale_stride_n, stored, mask=owns_scale)
        if COLUMNS:
            tl.store(column_scale + tile_n * column_scale_stride_n + tile_m * column_scale_stride_m, stored, mask=owns_scale)
        encoded = language.encode_scaled(codable, language.inverse(scale), FORMAT)
        encoded_t = encoded
    else:
        if ROWS:
            if KIND == "row":
                scale = language.scale_from_amax(tl.load(row_amax + first_row + rows, mask=is_row, other=0.0), FORMAT, MARGIN)
                owns_scale = is_row & (tile_n == 0)
            else:
                scale = language.scale_from_amax(language.amax(values, 1), FORMAT, MARGIN)
                owns_scale = is_row
            pointers = row_scale + (first_row + rows) * row_scale_stride_m + tile_n * row_scale_stride_n
            tl.store(pointers, scale, mask=owns_scale)
            encoded = language.encode_scaled(codable, language.inverse(scale)[:, None], FORMAT)
        if COLUMNS:
            if KIND == "row":
                scale_t = language.scale_from_amax(
                    tl.load(column_amax + first_column + columns, mask=is_column, other=0.0), FORMAT, MARGIN
                )
                owns_scale_t = is_column & (tile_m == 0)
            else:
                scale_t = language.scale_from_amax(language.amax(values, 0), FORMAT, MARGIN)
                owns_scale_t = is_column
            pointers_t = column_scale + (first_column + columns) * column_scale_stride_n + tile_m * column_scale_stride_m
            tl.store(pointers_t, scale_t, mask=owns_scale_t)
            encoded_t = language.encode_scaled(codable, language.inverse(scale_t)[None, :], FORMAT)
    if ROWS:
        outputs = codes + first_row * num_columns + first_column + rows[:, None] * num_columns + columns[None, :]
        tl.store(outputs, encoded, mask=mask)
    if COLUMNS:
        outputs_t = codes_t + first_column * num_rows + first_row + columns[:, None] * num_rows + rows[None, :]
        tl.store(outputs_t, tl.trans(encoded_t), mask=is_column[:, None] & is_row[None, :])
    if TRACKS_AMAX:
        language.atomic_amax(new_amax, language.amax(language.amax(values, 1), 0))


launch_flat = Launcher(_encode_flat, num_warps=FLAT_WARPS, enable_fp_fusion=False)
_launch_of_rows = Launcher(_quantize_rows, num_warps=ROW_WARPS, enable_fp_fusion=False)
_launch_mx = Launcher(mx.quantize_tile, num_warps=mx.WARPS, enable_fp_fusion=False)
_launch_tile, _launch_erf_tile = (
    Launcher(_quantize_tile, num_warps=num_warps, maxnreg=TILE_REGISTERS, enable_fp_fusion=False)
    for num_warps in (TILE_WARPS, ERF_TILE_WARPS)
)


def quantize(x: Tensor, dtype: torch.dtype, kind: ScaleKind, margin: int, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """See the reference."""
    if x.numel() == 0:
        return reference.quantize(x, dtype, kind, margin, amax)
    if kind is ScaleKind.TENSOR and x.is_contiguous():
        return _quantize_flat(x, dtype, margin, tensor_amax(x) if amax is None else amax.float())
    if amax is not None or kind is ScaleKind.TENSOR:
        amax = compute_amax(x, kind) if amax is None else amax
        dequant_scale = formats.dequant_scale_from_amax(amax, dtype, margin)
        return encode(x, dequant_scale, kind, dtype), dequant_scale
    x_MN = as_matrix(x)
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    dequant_scale = torch.empty(scale_shape(x.shape, kind), dtype=torch.float32, device=x.device)
    if kind is ScaleKind.ROW:
        _launch_rows(x_MN, codes, dequant_scale, margin)
    else:
        scales_MN = dequant_scale.view(-1, dequant_scale.shape[-1])
        _launch_tiles(x_MN, margin, ScaledCodes(codes, scales_MN, kind), None)
    return codes, dequant_scale


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
    """See the reference. With an amax that is used, x is read once, for codes and its own amax.

    activation: what is applied to x as it is read.
    """
    if x_MN.numel() == 0:  # every activation of nothing is the same
        return reference.quantize_operand(x_MN, dtype, kind, margin, sides, amax, uses_amax)
    new_amax = None
    if uses_amax is not None:
        assert amax is not None
        amax = torch.where(uses_amax, amax, tensor_amax(x_MN, uses_amax, activation))
        new_amax = torch.zeros((), dtype=torch.float32, device=x_MN.device)
    elif kind is ScaleKind.TENSOR and amax is None:
        amax = tensor_amax(x_MN, activation=activation)
    if amax is not None and sides == "rows" and x_MN.is_contiguous():
        parts = [*_quantize_flat(x_MN, dtype, margin, amax, new_amax, activation)]
        return parts if new_amax is None else [*parts, new_amax]
    x_MN = as_matrix(x_MN)
    rows, columns = _empty_operands(x_MN, dtype, kind, sides)
    if kind is ScaleKind.ROW and columns is None:
        assert rows is not None
        _launch_rows(x_MN, rows.codes, rows.dequant_scale, margin, activation)
    else:
        amaxes = row_and_column_amax(x_MN, activation) if kind is ScaleKind.ROW else (amax, None)
        _launch_tiles(x_MN, margin, rows, columns, amaxes, new_amax, activation)
    return [*(rows or ())[:2], *(columns or ())[:2], *(() if new_amax is None else (new_amax,))]


def _empty_operands(
    x_MN: Tensor, dtype: torch.dtype, kind: ScaleKind, sides: str
) -> tuple[ScaledCodes | None, ScaledCodes | None]:
    """Memory for codes and scales of x (M, N) and of its transpose; None for a side that is not wanted."""
    num_rows, num_columns = x_MN.shape
    rows = None if sides == "columns" else _empty_operand((num_rows, num_columns), x_MN.device, dtype, kind)
    columns = None if sides == "rows" else _empty_operand((num_columns, num_rows), x_MN.device, dtype, kind)
    return rows, columns


def _empty_operand(shape: tuple[int, int], device: torch.device, dtype: torch.dtype, kind: ScaleKind) -> ScaledCodes:
    codes = torch.empty(shape, dtype=dtype, device=device)
    if kind is ScaleKind.TENSOR:
        return ScaledCodes(codes, torch.empty((), dtype=torch.float32, device=device), kind)
    return ScaledCodes(codes, empty_operand_scale(codes.shape, kind, device), kind)


def _quantize_flat(
    x: Tensor,
    dtype: torch.dtype,
    margin: int,
    amax: Tensor,
    new_amax: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """x quantized with a scale of the tensor."""
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    dequant_scale = torch.empty((), dtype=torch.float32, device=x.device)
    num_elements = x.numel()
    launch_flat(
        language.cdiv(num_elements, FLAT_BLOCK), x, amax, None, codes, dequant_scale, new_amax, num_elements,
        FORMAT_NAMES[dtype], activation, margin, False, False, new_amax is not None, FLAT_BLOCK,
    )  # fmt: skip
    return codes, dequant_scale


def _launch_rows(x_MN: Tensor, codes: Tensor, dequant_scale: Tensor, margin: int, activation: str | None = None) -> None:
    num_rows, num_columns = x_MN.shape
    columns = min(triton.next_power_of_2(num_columns), MAX_ROW_BLOCK)
    rows = max(1, ROW_TILE // columns)
    _launch_of_rows(
        language.cdiv(num_rows, rows), x_MN, x_MN.stride(0), codes, dequant_scale, num_rows, num_columns,
        FORMAT_NAMES[codes.dtype], activation, margin, num_columns <= columns, rows, columns,
    )  # fmt: skip


def _launch_tiles(
    x_MN: Tensor,
    margin: int,
    rows: ScaledCodes | None,
    columns: ScaledCodes | None,
    amaxes: tuple[Tensor | None, Tensor | None] = (None, None),
    new_amax: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """rows, columns: where codes and scales go. amaxes: those of the rows, or the tensor, and of the columns, if given."""
    wanted = rows or columns
    assert wanted is not None
    num_rows, num_columns = x_MN.shape
    block_rows, block_columns = wanted.kind.block
    if wanted.kind.is_blockwise and block_rows == 1 and block_columns < BLOCK:
        _launch_mx(
            language.cdiv(num_rows, mx.TILE[0]) * language.cdiv(num_columns, mx.TILE[1]),
            x_MN, x_MN.stride(0), num_rows, num_columns, *_pointers(rows), *_pointers(columns),
            FORMAT_NAMES[wanted.codes.dtype], activation, margin, rows is not None, columns is not None,
            block_columns, *mx.TILE,
        )  # fmt: skip
        return
    kind, tile_m, tile_n = _kind_and_tile(wanted.kind, columns is not None)
    codes, row_scale, *row_strides = _pointers(rows)
    codes_t, column_scale, *column_strides = _pointers(columns)
    tile_launcher(activation)(
        language.cdiv(num_rows, tile_m) * language.cdiv(num_columns, tile_n),
        x_MN, *amaxes, None, new_amax, codes, row_scale, codes_t, column_scale, x_MN.stride(0), num_rows, num_columns,
        *row_strides, *column_strides, kind, FORMAT_NAMES[wanted.codes.dtype], activation, margin,
        rows is not None, columns is not None, False, new_amax is not None, tile_m, tile_n,
    )  # fmt: skip


def tile_launcher(activation: str | None) -> Launcher:
    """Return what launches `_quantize_tile`: with erf a tile has twice the threads.

    By as many threads as for others, and TILE_REGISTERS, it spills 32 to 80 bytes of each; by twice as many it takes 115
    registers at most (compute capability 9.0, Triton 3.7.1). As many threads run on a multiprocessor either way.
    """
    return _launch_erf_tile if activation == "gelu" else _launch_tile


def _kind_and_tile(kind: ScaleKind, has_columns: bool) -> tuple[str, int, int]:
    """Return what `_quantize_tile` calls a kind, and the size of its tiles."""
    if not kind.is_blockwise:
        return kind.value, *SHARED_SCALE_TILE
    block_rows, block_columns = kind.block
    if block_rows > 1:
        return "square", block_rows, block_columns
    return "narrow", block_columns if has_columns else ROWS_OF_BLOCKS, block_columns


def _pointers(operand: ScaledCodes | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    if operand is None:
        return None, None, 0, 0
    codes, dequant_scale, kind = operand
    stride_0, stride_1 = (0, 0) if kind is ScaleKind.TENSOR else dequant_scale.stride()
    return codes, dequant_scale, stride_0, stride_1
