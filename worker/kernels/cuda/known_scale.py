"""Codes that are written with values, and what completes them: the twin of `reference.complete`.

Shape suffixes: M rows, N columns. The tile is for an H200.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels import reference
from octet.worker.kernels.cuda import language
from octet.worker.kernels.cuda.launching import Launcher
from octet.worker.kernels.cuda.rescale import FORMAT_NAMES

TILE_M, TILE_N, WARPS = 128, 128, 8


@triton.jit
def write_codes(values, codes, amax, uses_amax, mask, FORMAT: tl.constexpr, MARGIN: tl.constexpr):
    """Codes of fp32 values at the scale of *amax, if *uses_amax. codes: pointers of the values' shape."""
    if tl.load(uses_amax) != 0:
        scale = language.scale_from_amax(tl.load(amax), FORMAT, MARGIN)
        tl.store(codes, language.encode_scaled(language.nan_unless_finite(values), language.inverse(scale), FORMAT), mask=mask)


# fmt: off
@triton.jit
def complete_kernel(
    x, codes, own_amax, amax, uses_amax, dequant_scale, codes_t, num_rows, num_columns,
    FORMAT: tl.constexpr, MARGIN: tl.constexpr, COLUMNS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
    # fmt: on
    """Transpose one tile of the codes, if *uses_amax; else make it, and its transpose, of x at the scale of x's own amax."""
    num_column_tiles = tl.cdiv(num_columns, TILE_N)
    tile_m, tile_n = tl.program_id(0) // num_column_tiles, tl.program_id(0) % num_column_tiles
    first_row, first_column = tile_m.to(tl.int64) * TILE_M, tile_n.to(tl.int64) * TILE_N
    rows, columns = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    is_row, is_column = rows < num_rows - first_row, columns < num_columns - first_column
    mask, mask_t = is_row[:, None] & is_column[None, :], is_column[:, None] & is_row[None, :]
    at = first_row * num_columns + first_column + rows[:, None] * num_columns + columns[None, :]
    at_t = first_column * num_rows + first_row + columns[:, None] * num_rows + rows[None, :]
    is_written = tl.load(uses_amax) != 0
    scale = language.scale_from_amax(tl.where(is_written, tl.load(amax), tl.load(own_amax)), FORMAT, MARGIN)
    if tl.program_id(0) == 0:
        tl.store(dequant_scale, scale)
    if is_written:
        if COLUMNS:
            tl.store(codes_t + at_t, tl.trans(tl.load(codes + at, mask=mask, other=0)), mask=mask_t)
    else:
        values = language.nan_unless_finite(tl.load(x + at, mask=mask, other=0.0).to(tl.float32))
        encoded = language.encode_scaled(values, language.inverse(scale), FORMAT)
        tl.store(codes + at, encoded, mask=mask)
        if COLUMNS:
            tl.store(codes_t + at_t, tl.trans(encoded), mask=mask_t)


_launch = Launcher(complete_kernel, num_warps=WARPS, enable_fp_fusion=False)


def complete(
    codes: Tensor, x: Tensor, own_amax: Tensor, margin: int, amax: Tensor, uses_amax: Tensor, columns: bool
) -> tuple[Tensor, Tensor]:
    """See the reference. One launch."""
    if x.numel() == 0:
        return reference.complete(codes, x, own_amax, margin, amax, uses_amax, columns)
    num_rows, num_columns = x.shape
    dequant_scale = torch.empty((), dtype=torch.float32, device=x.device)
    codes_t = torch.empty((num_columns, num_rows), dtype=codes.dtype, device=x.device) if columns else None
    num_programs = language.cdiv(num_rows, TILE_M) * language.cdiv(num_columns, TILE_N)
    _launch(
        num_programs, x.contiguous(), codes, own_amax, amax, uses_amax, dequant_scale, codes_t, num_rows, num_columns,
        FORMAT_NAMES[codes.dtype], margin, columns, TILE_M, TILE_N,
    )  # fmt: skip
    return dequant_scale, codes.new_empty(0) if codes_t is None else codes_t
