"""FP8 codes the other way round, for products over what was a matrix's rows: one byte read and one written for each.

Shape suffixes: M rows, N columns. The tile is for an H200.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels.cuda import language
from octet.worker.kernels.cuda.amax import as_matrix
from octet.worker.kernels.cuda.launching import Launcher

TILE_M, TILE_N, WARPS = 128, 128, 8


@triton.jit
def _transpose(codes, stride, out, num_rows, num_columns, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    num_column_tiles = tl.cdiv(num_columns, TILE_N)
    tile_m, tile_n = tl.program_id(0) // num_column_tiles, tl.program_id(0) % num_column_tiles
    first_row, first_column = tile_m.to(tl.int64) * TILE_M, tile_n.to(tl.int64) * TILE_N
    rows, columns = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    is_row, is_column = rows < num_rows - first_row, columns < num_columns - first_column
    inputs = codes + first_row * stride + first_column + rows[:, None] * stride + columns[None, :]
    tile = tl.load(inputs, mask=is_row[:, None] & is_column[None, :], other=0)
    outputs = out + first_column * num_rows + first_row + columns[:, None] * num_rows + rows[None, :]
    tl.store(outputs, tl.trans(tile), mask=is_column[:, None] & is_row[None, :])


_launch = Launcher(_transpose, num_warps=WARPS)


def transpose(codes_MN: Tensor) -> Tensor:
    """The codes (N, M), contiguous, of FP8 codes (M, N)."""
    num_rows, num_columns = codes_MN.shape
    out_NM = torch.empty(num_columns, num_rows, dtype=codes_MN.dtype, device=codes_MN.device)
    if codes_MN.numel():
        codes = as_matrix(codes_MN)
        num_programs = language.cdiv(num_rows, TILE_M) * language.cdiv(num_columns, TILE_N)
        shape = (num_rows, num_columns, TILE_M, TILE_N)
        _launch(num_programs, codes, codes.stride(0), out_NM, *shape)
    return out_NM
