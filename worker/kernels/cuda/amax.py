"""Largest magnitudes, and whether all is finite: twins of `reference.compute_amax` and `reference.all_finite`.

Magnitudes are compared as integers (language.amax), so that a NaN is never dropped. Shape suffixes: M rows, N columns.
Block sizes are for an H200 and bf16; a program should keep at least 16 kB in flight, and two programs fit on a multiprocessor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels import reference
from octet.worker.kernels.cuda import activations, language
from octet.worker.kernels.cuda.launching import Launcher
from octet.worker.kernels.formats import BLOCK
from octet.worker.kernels.scales import ScaleKind, scale_shape

FLAT_BLOCK, FLAT_BLOCKS_PER_PROGRAM, FLAT_WARPS = 8192, 4, 8
MAX_ROW_BLOCK = 16384  # columns of a row that a program holds at once; a longer row takes several turns
ROW_TILE = 8192  # elements: short rows share a program
ROWS_OF_BLOCKS = 64  # of 1×128
TILE_WARPS = 8


# fmt: off
@triton.jit
def _amax_flat(
    x, out, unless, num_elements,
    HAS_UNLESS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):
    # fmt: on
    """*out = max(*out, amax of x, or of an activation of x); x is not read if *unless is set."""
    is_wanted = True
    if HAS_UNLESS:
        is_wanted = tl.load(unless) == 0
    if is_wanted:
        largest = tl.zeros((BLOCK,), tl.float32)
        for block in tl.static_range(NUM_BLOCKS):
            start = (tl.program_id(0).to(tl.int64) * NUM_BLOCKS + block) * BLOCK
            offsets = tl.arange(0, BLOCK)
            given = tl.load(x + start + offsets, mask=offsets < num_elements - start, other=0.0)
            largest = language.max_magnitude(largest, tl.abs(activations.activated(given, ACTIVATION)))
        language.atomic_amax(out, language.amax(largest, 0))


@triton.jit
def _amax_rows(x, stride, out, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write an amax for each row."""
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row = rows < num_rows - first_row
    pointers = x + first_row * stride + rows[:, None] * stride + columns[None, :]
    largest = tl.zeros((ROWS,), tl.float32)
    for start in range(0, num_columns, COLUMNS):
        mask = is_row[:, None] & (columns[None, :] < num_columns - start)
        values = tl.load(pointers + start, mask=mask, other=0.0).to(tl.float32)
        largest = language.max_magnitude(largest, language.amax(values, 1))
    tl.store(out + first_row + rows, largest, mask=is_row)


@triton.jit
def _amax_tiles(x, stride, out, num_rows, num_columns, IS_SQUARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write an amax for each tile, or for each row of each tile."""
    num_column_tiles = tl.cdiv(num_columns, COLUMNS)
    tile_m, tile_n = tl.program_id(0) // num_column_tiles, tl.program_id(0) % num_column_tiles
    first_row = tile_m.to(tl.int64) * ROWS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row = rows < num_rows - first_row
    mask = is_row[:, None] & (columns[None, :] < num_columns - tile_n * COLUMNS)
    pointers = x + first_row * stride + tile_n * COLUMNS + rows[:, None] * stride + columns[None, :]
    largest = language.amax(tl.load(pointers, mask=mask, other=0.0).to(tl.float32), 1)
    if IS_SQUARE:
        tl.store(out + tl.program_id(0), language.amax(largest, 0))
    else:
        tl.store(out + (first_row + rows) * num_column_tiles + tile_n, largest, mask=is_row)


# fmt: off
@triton.jit
def _amax_both(
    x, stride, by_row, by_column, num_rows, num_columns,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    """Raise an amax for each row and one for each column, from one read."""
    num_column_tiles = tl.cdiv(num_columns, COLUMNS)
    tile_m, tile_n = tl.program_id(0) // num_column_tiles, tl.program_id(0) % num_column_tiles
    first_row, first_column = tile_m.to(tl.int64) * ROWS, tile_n * COLUMNS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows - first_row, columns < num_columns - first_column
    pointers = x + first_row * stride + first_column + rows[:, None] * stride + columns[None, :]
    given = tl.load(pointers, mask=is_row[:, None] & is_column[None, :], other=0.0)
    values = activations.activated(given, ACTIVATION)
    row_bits = language.amax(values, 1).to(tl.int32, bitcast=True)
    column_bits = language.amax(values, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(by_row + first_row + rows, row_bits, mask=is_row)
    tl.atomic_max(by_column + first_column + columns, column_bits, mask=is_column)


@triton.jit
def _clear_unless_finite(bits, out, num_elements, SIGNLESS: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """*out = 0 if a code, read as an integer without its sign, is LIMIT or more."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    codes = tl.load(bits + start + offsets, mask=offsets < num_elements - start, other=0).to(tl.int32) & SIGNLESS
    tl.store(out, 0, mask=tl.max(codes, 0) >= LIMIT)


launch_flat = Launcher(_amax_flat, num_warps=FLAT_WARPS)
_launch_rows = Launcher(_amax_rows)
_launch_tiles = Launcher(_amax_tiles, num_warps=TILE_WARPS)
_launch_both = Launcher(_amax_both, num_warps=TILE_WARPS)
_launch_finite = Launcher(_clear_unless_finite, num_warps=FLAT_WARPS)


def as_matrix(x: Tensor) -> Tensor:
    """x as (rows, columns) with adjacent columns: a view where the strides allow one, else a copy."""
    if x.ndim == 2 and x.stride(1) == 1:
        return x
    matrix = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def as_flat(x: Tensor) -> Tensor:
    """All elements in some order; a view where memory has no gaps between them."""
    if not x.is_contiguous() and x.ndim == 2 and x.t().is_contiguous():
        return x.t().view(-1)
    return x.contiguous().view(-1)


def compute_amax(x: Tensor, kind: ScaleKind) -> Tensor:
    """See the reference."""
    if x.numel() == 0:
        return reference.compute_amax(x, kind)
    if kind is ScaleKind.TENSOR:
        return tensor_amax(x)
    x_MN = as_matrix(x)
    num_rows, num_columns = x_MN.shape
    out = torch.empty(scale_shape(x.shape, kind), dtype=torch.float32, device=x.device)
    if kind is ScaleKind.ROW:
        columns = min(triton.next_power_of_2(num_columns), MAX_ROW_BLOCK)
        rows = max(1, ROW_TILE // columns)
        _launch_rows(language.cdiv(num_rows, rows), x_MN, x_MN.stride(0), out, num_rows, num_columns, rows, columns)
        return out
    block_rows, columns = kind.block
    is_square = block_rows > 1
    rows = block_rows if is_square else ROWS_OF_BLOCKS * BLOCK // columns
    num_programs = language.cdiv(num_rows, rows) * language.cdiv(num_columns, columns)
    _launch_tiles(num_programs, x_MN, x_MN.stride(0), out, num_rows, num_columns, is_square, rows, columns)
    return out


def flat_blocks(activation: str | None) -> tuple[int, int]:
    """Return the elements of a block, and the blocks of a program.

    With whole blocks a thread computes 32 values of erf at once and spills at 255 registers; with halves it takes 125 (compute
    capability 9.0, Triton 3.7.1).
    """
    return (FLAT_BLOCK // 2 if activation == "gelu" else FLAT_BLOCK), FLAT_BLOCKS_PER_PROGRAM


def tensor_amax(x: Tensor, unless: Tensor | None = None, activation: str | None = None) -> Tensor:
    """The amax of x, or of an activation of x; 0, without reading x, where the bool `unless` is set: decided on the device."""
    out = torch.zeros((), dtype=torch.float32, device=x.device)
    flat = x if x.is_contiguous() else as_flat(x)
    num_elements = x.numel()
    block, num_blocks = flat_blocks(activation)
    num_programs = language.cdiv(num_elements, block * num_blocks)
    launch_flat(num_programs, flat, out, unless, num_elements, unless is not None, activation, block, num_blocks)
    return out


def row_and_column_amax(x_MN: Tensor, activation: str | None = None) -> tuple[Tensor, Tensor]:
    """Return the amaxes (M,) of the rows and (N,) of the columns of x, or of an activation of x, from one read."""
    num_rows, num_columns = x_MN.shape
    bits = torch.zeros(num_rows + num_columns, dtype=torch.int32, device=x_MN.device)
    by_row, by_column = bits[:num_rows], bits[num_rows:]
    num_programs = language.cdiv(num_rows, BLOCK) * language.cdiv(num_columns, BLOCK)
    _launch_both(num_programs, x_MN, x_MN.stride(0), by_row, by_column, num_rows, num_columns, activation, BLOCK, BLOCK)
    return by_row.view(torch.float32), by_column.view(torch.float32)


def all_finite(x: Tensor) -> Tensor:
    """See the reference."""
    if x.numel() == 0:
        return reference.all_finite(x)
    out = torch.ones((), dtype=torch.bool, device=x.device)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    bits = as_flat(x).view(integer)
    signless = (1 << (8 * x.dtype.itemsize - 1)) - 1
    limit = 0x7F if x.dtype == torch.float8_e4m3fn else int(torch.tensor(torch.inf, dtype=x.dtype).view(integer))
    num_programs = language.cdiv(bits.numel(), FLAT_BLOCK)
    _launch_finite(num_programs, bits, out.view(torch.uint8), bits.numel(), signless, limit, FLAT_BLOCK)
    return out
