"""Codes at a given scale of any granularity, and values of codes: twins of the reference's `encode` and two `dequantize`s."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octet.worker.kernels import reference
from octet.worker.kernels.cuda import language
from octet.worker.kernels.cuda.amax import as_matrix
from octet.worker.kernels.cuda.launching import Launcher
from octet.worker.kernels.formats import BLOCK
from octet.worker.kernels.scales import ScaledCodes, ScaleKind

FORMAT_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float16: "fp16"}
TILE, WARPS = 8192, 8  # elements of a program


@triton.jit
def _rescale_tile(
    x,
    stride,
    scales,
    scale_stride_m,
    scale_stride_n,
    out,
    num_rows,
    num_columns,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    IN_FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """x / scale encoded, or decoded codes * scale, as OUT_FORMAT says; SCALE_ROWS · SCALE_COLUMNS elements share a scale."""
    num_column_tiles = tl.cdiv(num_columns, TILE_N)
    tile_m, tile_n = tl.program_id(0) // num_column_tiles, tl.program_id(0) % num_column_tiles
    first_row, first_column = tile_m.to(tl.int64) * TILE_M, tile_n.to(tl.int64) * TILE_N
    rows, columns = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    is_row = rows < num_rows - first_row
    mask = is_row[:, None] & (columns[None, :] < num_columns - first_column)
    scale_row = (first_row + rows) // SCALE_ROWS * scale_stride_m
    scale = tl.load(scales + scale_row + first_column // SCALE_COLUMNS * scale_stride_n, mask=is_row, other=1.0)
    inputs = x + first_row * stride + first_column + rows[:, None] * stride + columns[None, :]
    values = language.decode(tl.load(inputs, mask=mask, other=0), IN_FORMAT)
    if OUT_FORMAT == "values":
        result = language.cast(values * scale[:, None], out.dtype.element_ty)
    else:
        values = language.nan_unless_finite(values)
        result = language.encode_scaled(values, tl.div_rn(1.0, scale)[:, None], OUT_FORMAT)
    outputs = out + first_row * num_columns + first_column + rows[:, None] * num_columns + columns[None, :]
    tl.store(outputs, result, mask=mask)


@triton.jit
def _decode_split(codes, residual, dequant_scale, out, num_elements, BLOCK: tl.constexpr):
    """Decode E4M3 codes that have an INT8 residual each, and one scale for all."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    mask = offsets < num_elements - start
    coarse = tl.load(codes + start + offsets, mask=mask, other=0)
    values = language.split_decode(coarse, tl.load(residual + start + offsets, mask=mask, other=0))
    tl.store(out + start + offsets, language.cast(values * tl.load(dequant_scale), out.dtype.element_ty), mask=mask)


_launch_rescale = Launcher(_rescale_tile, num_warps=WARPS, enable_fp_fusion=False)
_launch_split = Launcher(_decode_split, num_warps=WARPS)


def encode(x: Tensor, dequant_scale: Tensor, kind: ScaleKind, dtype: torch.dtype) -> Tensor:
    """See the reference."""
    if x.numel() == 0:
        return reference.encode(x, dequant_scale, kind, dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _rescale(x, dequant_scale, kind, out, "values", FORMAT_NAMES[dtype])
    return out


def dequantize(quantized: ScaledCodes, dtype: torch.dtype) -> Tensor:
    """See the reference."""
    codes, dequant_scale, kind = quantized
    if codes.numel() == 0:
        return reference.dequantize(quantized, dtype)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    _rescale(codes, dequant_scale, kind, out, FORMAT_NAMES[codes.dtype], "values")
    return out


def split_dequantize(codes: Tensor, residual: Tensor, dequant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See the reference. One pass: 4 bytes for each element in bf16."""
    if codes.numel() == 0:
        return reference.split_dequantize(codes, residual, dequant_scale, dtype)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    _launch_split(language.cdiv(codes.numel(), TILE), codes, residual, dequant_scale, out, codes.numel(), TILE)
    return out


def _rescale(x: Tensor, dequant_scale: Tensor, kind: ScaleKind, out: Tensor, in_format: str, out_format: str) -> None:
    if kind is ScaleKind.TENSOR and x.is_contiguous():
        x_MN = x.view(1, -1) if x.numel() % BLOCK else x.view(-1, BLOCK)
    else:
        x_MN = as_matrix(x)
    num_rows, num_columns = x_MN.shape
    scales = dequant_scale.expand(1, 1) if kind is ScaleKind.TENSOR else dequant_scale.reshape(-1, dequant_scale.shape[-1])
    strides = (scales.stride(0), scales.stride(1) if kind.is_blockwise else 0)
    columns = kind.block[1] if kind.is_blockwise else min(triton.next_power_of_2(num_columns), TILE)
    rows = min(triton.next_power_of_2(num_rows), max(1, TILE // columns))
    num_programs = language.cdiv(num_rows, rows) * language.cdiv(num_columns, columns)
    shape = (num_rows, num_columns, *kind.block)
    _launch_rescale(num_programs, x_MN, x_MN.stride(0), scales, *strides, out, *shape, in_format, out_format, rows, columns)
