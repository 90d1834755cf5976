"""Quantize by blocks narrower than 128 along the summed dimension, and lay out the scales of OCP's MXFP8 for cuBLASLt.

MXFP8 has blocks of 32. A dequant_scale is fp32 here as everywhere; `swizzled` writes it as E8M0, the exponent alone, in the
order in which Blackwell's tensor cores read it. Shape suffixes: M rows, N columns.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels.cuda import activations, language

TILE, WARPS = (64, 128), 4
SCALE_ROWS, SCALE_COLUMNS = 128, 4  # scales that cuBLASLt keeps together, in 512 bytes


# fmt: off
@triton.jit
def quantize_tile(
    x, stride, num_rows, num_columns,
    codes, row_scale, row_scale_stride_m, row_scale_stride_n,
    codes_t, column_scale, column_scale_stride_n, column_scale_stride_m,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, MARGIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
    # fmt: on
    """One tile: codes (M, N) with a scale for each 1×BLOCK elements, codes_t (N, M) with one for each of the transposed.

    A block lies along one axis of what a program holds at once, so that its amax is an ordinary reduction; what is read for
    the rows is read again for the columns, from the cache.
    """
    num_column_tiles = tl.cdiv(num_columns, TILE_N)
    tile_m, tile_n = tl.program_id(0) // num_column_tiles, tl.program_id(0) % num_column_tiles
    first_row, first_column = tile_m.to(tl.int64) * TILE_M, tile_n.to(tl.int64) * TILE_N
    x += first_row * stride + first_column
    within = tl.arange(0, BLOCK)
    if ROWS:
        blocks = tl.arange(0, TILE_M * (TILE_N // BLOCK))
        row, block = blocks // (TILE_N // BLOCK), blocks % (TILE_N // BLOCK)
        is_block = (row < num_rows - first_row) & (block * BLOCK < num_columns - first_column)
        column = block[:, None] * BLOCK + within[None, :]
        mask = is_block[:, None] & (column < num_columns - first_column)
        values = activations.activated(tl.load(x + row[:, None] * stride + column, mask=mask, other=0.0), ACTIVATION)
        scale = language.scale_from_amax(language.amax(values, 1), FORMAT, MARGIN)
        pointers = row_scale + (first_row + row) * row_scale_stride_m + (first_column // BLOCK + block) * row_scale_stride_n
        tl.store(pointers, scale, mask=is_block)
        encoded = language.encode_scaled(language.nan_unless_finite(values), language.inverse(scale)[:, None], FORMAT)
        tl.store(codes + first_row * num_columns + first_column + row[:, None] * num_columns + column, encoded, mask=mask)
    if COLUMNS:
        columns = tl.arange(0, TILE_N)
        is_column = columns < num_columns - first_column
        for number in tl.static_range(TILE_M // BLOCK):
            rows = number * BLOCK + within
            is_row = rows < num_rows - first_row
            mask_t = is_row[:, None] & is_column[None, :]
            given_t = tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask_t, other=0.0)
            values_t = activations.activated(given_t, ACTIVATION)
            scale_t = language.scale_from_amax(language.amax(values_t, 0), FORMAT, MARGIN)
            pointers_t = column_scale + (first_column + columns) * column_scale_stride_n
            pointers_t += (first_row // BLOCK + number) * column_scale_stride_m
            tl.store(pointers_t, scale_t, mask=is_column & (number * BLOCK < num_rows - first_row))
            codable_t = language.nan_unless_finite(values_t)
            encoded_t = language.encode_scaled(codable_t, language.inverse(scale_t)[None, :], FORMAT)
            outputs_t = codes_t + first_column * num_rows + first_row + columns[:, None] * num_rows + rows[None, :]
            tl.store(outputs_t, tl.trans(encoded_t), mask=is_column[:, None] & is_row[None, :])


def swizzled(dequant_scale_MB: Tensor) -> Tensor:
    """Scales (rows, blocks of the summed dimension), powers of two in fp32, as E8M0 in the order that cuBLASLt reads.

    Tiles of 128 rows and 4 blocks follow one another by rows. In a tile the scale of row r and block b has the place
    16 · (r mod 32) + 4 · (r div 32) + b (cuBLAS' documentation, "1D Block Scaling Factors Layout"). Missing ones are 2^-127.
    """
    exponents = (dequant_scale_MB.contiguous().view(torch.int32) >> 23).to(torch.uint8)  # of an fp32: biased by 127, as E8M0's
    num_rows, num_blocks = exponents.shape
    padded = F.pad(exponents, (0, -num_blocks % SCALE_COLUMNS, 0, -num_rows % SCALE_ROWS))
    tiles = padded.view(padded.shape[0] // SCALE_ROWS, 4, 32, padded.shape[1] // SCALE_COLUMNS, SCALE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1).view(torch.float8_e8m0fnu)
