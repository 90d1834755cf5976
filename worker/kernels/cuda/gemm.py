"""The scaled GEMM on CUDA devices: cuBLASLt through torch's `scaled_mm` where it has the product, else a Triton kernel.

`plan` is the table of what runs where. cuBLASLt takes both operands with K contiguous and its scales laid out in a way of
its own for each kind (ScaledBlas.cpp of torch 2.11):
  tensor () · row a (M, 1), b (1, N) · block 1×128 (M, K/128) with rows adjacent · block 128×128 (K/128 up to a multiple of 4,
  N/128) with K adjacent · block 1×32 E8M0, as `mx.swizzled`.
Legend: M rows of a, N rows of b, K the summed dimension.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from octet.worker.kernels.cuda import language, mx
from octet.worker.kernels.cuda.launching import Launcher
from octet.worker.kernels.cuda.rescale import FORMAT_NAMES
from octet.worker.kernels.cuda.transpose import transpose
from octet.worker.kernels.formats import MX_BLOCK
from octet.worker.kernels.scales import ScaledCodes, ScaleKind
from octet.worker.kernels.torch_private import scaled_mm

RECIPES = {
    ScaleKind.TENSOR: ScalingType.TensorWise,
    ScaleKind.ROW: ScalingType.RowWise,
    ScaleKind.BLOCK_1X32: ScalingType.BlockWise1x32,
    ScaleKind.BLOCK_1X128: ScalingType.BlockWise1x128,
    ScaleKind.BLOCK_128X128: ScalingType.BlockWise128x128,
}
"""The kinds of scale that cuBLASLt reads. Triton multiplies all others."""

HOPPER, BLACKWELL = (9, 0), (10, 0)
TENSORS, ROWS, MX = [(kind, kind) for kind in (ScaleKind.TENSOR, ScaleKind.ROW, ScaleKind.BLOCK_1X32)]
SCALE_ALIGNMENT = 4  # rows: 16 bytes of the scales of a block of K

TILE_M, TILE_N, TILE_GROUP, WARPS = 128, 128, 8, 8
NUM_STAGES = {HOPPER: 4}  # tiles of a and b in flight; elsewhere 2, for 100 kB of shared memory


class Plan(NamedTuple):
    """backend: "scaled_mm" or "triton". out_dtype: the product's dtype before a cast to the dtype that was asked for."""

    backend: str
    out_dtype: torch.dtype


def plan(
    kinds: tuple[ScaleKind, ScaleKind],
    dtypes: tuple[torch.dtype, torch.dtype],
    capability: tuple[int, int],
    cuda_version: tuple[int, int],
    out_dtype: torch.dtype,
) -> Plan:
    """Choose what computes a product. cuBLASLt leaves a result in fp32 where it cannot round it to out_dtype.

    torch multiplies rows by CUTLASS where cuBLASLt does not, on 8.9 and from 10.0 on: into bf16 in all its versions, and b in
    E4M3 (RowwiseScaledMM.cu). Blocks 1×128 and 128×128 it has on 9.0 alone (`_check_deepseek_support` in ScaledBlas.cpp).
    """
    if kinds == TENSORS:
        return Plan("scaled_mm", out_dtype)
    if kinds == MX:
        return Plan("scaled_mm" if capability >= BLACKWELL and cuda_version >= (12, 8) else "triton", out_dtype)
    has_scaled_rows_and_blocks = capability == HOPPER and cuda_version >= (12, 9)
    if kinds != ROWS and (set(dtypes) != {torch.float8_e4m3fn} or not RECIPES.keys() >= set(kinds)):
        return Plan("triton", out_dtype)
    if has_scaled_rows_and_blocks:
        return Plan("scaled_mm", torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32)
    has_cutlass = kinds == ROWS and out_dtype == torch.bfloat16 and dtypes[1] == torch.float8_e4m3fn
    return Plan("scaled_mm" if has_cutlass else "triton", out_dtype)


def matmul(a_MK: ScaledCodes, b_NK: ScaledCodes, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    """See the reference."""
    a_codes, b_codes = a_MK.codes, b_NK.codes
    if not (a_codes.numel() and b_codes.numel()):
        return torch.zeros(a_codes.shape[0], b_codes.shape[0], dtype=out_dtype, device=a_codes.device)
    if a_MK.kind is b_NK.kind is ScaleKind.TENSOR:  # by `plan`, on every device
        a_codes = a_codes if a_codes.is_contiguous() else with_adjacent_columns(a_codes)
        b_codes = b_codes if b_codes.is_contiguous() else with_adjacent_columns(b_codes)
        # F.scaled_mm, which takes every kind of scale, spends on its arguments what five launches take.
        scales = a_MK.dequant_scale, b_NK.dequant_scale
        return scaled_mm(a_codes, b_codes.t(), *scales, out_dtype=out_dtype, use_fast_accum=fast_accumulation)
    a_MK, b_NK = with_matching_scales(a_MK, b_NK)
    a_MK = ScaledCodes(with_adjacent_columns(a_MK.codes), a_MK.dequant_scale, a_MK.kind)
    b_NK = ScaledCodes(with_adjacent_columns(b_NK.codes), b_NK.dequant_scale, b_NK.kind)
    capability, cuda_version = platform(a_MK.codes.device)
    chosen = plan((a_MK.kind, b_NK.kind), (a_MK.codes.dtype, b_NK.codes.dtype), capability, cuda_version, out_dtype)
    if chosen.backend == "triton":
        return triton_matmul(a_MK, b_NK, out_dtype, NUM_STAGES.get(capability, 2))
    out_MN = cublas_matmul(a_MK, b_NK, chosen.out_dtype, fast_accumulation)
    return out_MN if chosen.out_dtype == out_dtype else out_MN.to(out_dtype)


@cache
def platform(device: torch.device) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the compute capability of a device, and the CUDA version of the cuBLASLt that torch loads."""
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return torch.cuda.get_device_capability(device), (int(major), int(minor))


def cublas_matmul(a_MK: ScaledCodes, b_NK: ScaledCodes, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    """The product of contiguous codes with scales that match, of rows or blocks."""
    if a_MK.kind is ScaleKind.BLOCK_1X32:
        return _mx_matmul(a_MK, b_NK, out_dtype)
    a_codes, a_dequant_scale, a_kind = a_MK
    b_codes, b_dequant_scale, b_kind = b_NK
    num_rows = a_codes.shape[0]
    if a_kind is ScaleKind.BLOCK_1X128 and num_rows % SCALE_ALIGNMENT:
        padding = (0, 0, 0, -num_rows % SCALE_ALIGNMENT)
        a_codes = F.pad(a_codes.view(torch.uint8), padding).view(a_codes.dtype)
        a_dequant_scale = F.pad(a_dequant_scale, padding, value=1.0)
    a_scale, b_scale = cublas_scale(a_dequant_scale, a_kind), cublas_scale(b_dequant_scale, b_kind)
    out_MN = F.scaled_mm(
        a_codes, b_codes.t(), a_scale, RECIPES[a_kind], b_scale.t() if b_kind is ScaleKind.ROW else b_scale, RECIPES[b_kind],
        output_dtype=out_dtype, use_fast_accum=fast_accumulation,
    )  # fmt: skip
    return out_MN[:num_rows]


def _mx_matmul(a_MK: ScaledCodes, b_NK: ScaledCodes, out_dtype: torch.dtype) -> Tensor:
    """The product of blocks 1×32; the summed dimension is padded to whole blocks with zero codes."""
    padding = (0, -a_MK.codes.shape[1] % MX_BLOCK)
    a_codes, b_codes = (F.pad(operand.codes.view(torch.uint8), padding).view(operand.codes.dtype) for operand in (a_MK, b_NK))
    recipe, swizzle = RECIPES[ScaleKind.BLOCK_1X32], SwizzleType.SWIZZLE_32_4_4
    return F.scaled_mm(
        a_codes, b_codes.t(), mx.swizzled(a_MK.dequant_scale), recipe, mx.swizzled(b_NK.dequant_scale), recipe,
        swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=out_dtype,
    )  # fmt: skip


def with_matching_scales(a_MK: ScaledCodes, b_NK: ScaledCodes) -> tuple[ScaledCodes, ScaledCodes]:
    """Bring both scales to the same family: block, tensor or row. Over one block of K a block's scale is one of the row."""
    if a_MK.kind is b_NK.kind is ScaleKind.TENSOR or (a_MK.kind.is_blockwise and a_MK.codes.shape[1] > a_MK.kind.block[1]):
        return a_MK, b_NK
    return _scaled_by_row(a_MK), _scaled_by_row(b_NK)


def _scaled_by_row(quantized: ScaledCodes) -> ScaledCodes:
    """With a contiguous scale (rows, 1), of any scale that has one for all of a row."""
    codes, dequant_scale, kind = quantized
    if kind.block[0] > 1:
        dequant_scale = dequant_scale.repeat_interleave(kind.block[0], 0)[: codes.shape[0]]
    else:
        dequant_scale = dequant_scale.expand(codes.shape[0], 1).contiguous()
    return ScaledCodes(codes, dequant_scale, ScaleKind.ROW)


def with_adjacent_columns(codes: Tensor) -> Tensor:
    """The codes with their last dimension contiguous; a transposed view is transposed by the kernel for that."""
    if codes.is_contiguous():
        return codes
    return transpose(codes.t()) if codes.stride(0) == 1 else codes.contiguous()


def cublas_scale(dequant_scale: Tensor, kind: ScaleKind) -> Tensor:
    """A dequant_scale laid out as cuBLASLt reads it; block 1×128 scales of `scales.empty_operand_scale` are already."""
    if kind is ScaleKind.BLOCK_1X128:
        return dequant_scale.t().contiguous().t()
    if kind is ScaleKind.BLOCK_128X128:
        return F.pad(dequant_scale, (0, -dequant_scale.shape[1] % SCALE_ALIGNMENT)).contiguous().t()
    return dequant_scale


@triton.jit
def load_codes(pointers, mask, FORMAT: tl.constexpr):
    """FP8 codes, which `tl.dot` reads through shared memory if nothing is done to them; under the interpreter their values."""
    codes = tl.load(pointers, mask=mask, other=0.0)
    if language.INTERPRETED:
        return language.decode(codes.to(tl.uint8, bitcast=True), FORMAT)
    else:
        return codes


@triton.jit
def dot(a, b):
    """a @ b.T in fp32; tensor cores of Hopper add up to 128 products in less and are then emptied."""
    if language.INTERPRETED:
        return tl.dot(a, tl.trans(b), input_precision="ieee")
    else:
        NUM_PRODUCTS: tl.constexpr = 128 if a.shape[1] > 128 else a.shape[1]  # Triton takes no more than there are
        return tl.dot(a, tl.trans(b), max_num_imprecise_acc=NUM_PRODUCTS)


@triton.jit
def _matmul(
    a,
    a_scale,
    a_scale_stride_m,
    a_scale_stride_k,
    b,
    b_scale,
    b_scale_stride_n,
    b_scale_stride_k,
    out,
    num_rows,
    num_columns,
    num_summed,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_SCALE_ROWS: tl.constexpr,
    B_SCALE_ROWS: tl.constexpr,
    IS_BLOCKWISE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_GROUP: tl.constexpr,
):
    """One tile of a @ b.T. A scale is shared by A_SCALE_ROWS rows, and, if IS_BLOCKWISE, by TILE_K of the summed elements.

    Programs go through TILE_GROUP rows of tiles column by column, so that what they read stays in the L2 cache.
    """
    num_tiles_m, num_tiles_n = tl.cdiv(num_rows, TILE_M), tl.cdiv(num_columns, TILE_N)
    group = tl.program_id(0) // (TILE_GROUP * num_tiles_n)
    group_rows = tl.minimum(num_tiles_m - group * TILE_GROUP, TILE_GROUP)
    in_group = tl.program_id(0) % (TILE_GROUP * num_tiles_n)
    tile_m, tile_n = group * TILE_GROUP + in_group % group_rows, in_group // group_rows
    rows = tile_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    columns = tile_n.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    summed = tl.arange(0, TILE_K)
    is_row, is_column = rows < num_rows, columns < num_columns
    a_pointers = a + rows[:, None] * num_summed + summed[None, :]
    b_pointers = b + columns[:, None] * num_summed + summed[None, :]
    a_scales = a_scale + rows // A_SCALE_ROWS * a_scale_stride_m
    b_scales = b_scale + columns // B_SCALE_ROWS * b_scale_stride_n
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(tl.cdiv(num_summed, TILE_K)):
        is_summed = summed < num_summed - step * TILE_K
        a_tile = load_codes(a_pointers + step * TILE_K, is_row[:, None] & is_summed[None, :], A_FORMAT)
        b_tile = load_codes(b_pointers + step * TILE_K, is_column[:, None] & is_summed[None, :], B_FORMAT)
        if IS_BLOCKWISE:
            a_block = tl.load(a_scales + step * a_scale_stride_k, mask=is_row, other=0.0)
            b_block = tl.load(b_scales + step * b_scale_stride_k, mask=is_column, other=0.0)
            total += dot(a_tile, b_tile) * (a_block[:, None] * b_block[None, :])
        else:
            total += dot(a_tile, b_tile)
    if not IS_BLOCKWISE:
        a_all, b_all = tl.load(a_scales, mask=is_row, other=0.0), tl.load(b_scales, mask=is_column, other=0.0)
        total *= a_all[:, None] * b_all[None, :]
    outputs = out + rows[:, None] * num_columns + columns[None, :]
    tl.store(outputs, language.cast(total, out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@cache
def _launcher(num_stages: int) -> Launcher:
    return Launcher(_matmul, reads_fp8=True, num_warps=WARPS, num_stages=num_stages)


def triton_matmul(a_MK: ScaledCodes, b_NK: ScaledCodes, out_dtype: torch.dtype, num_stages: int) -> Tensor:
    """The product of contiguous codes of any formats with scales of any kinds that match."""
    (num_rows, num_summed), num_columns = a_MK.codes.shape, b_NK.codes.shape[0]
    out_MN = torch.empty(num_rows, num_columns, dtype=out_dtype, device=a_MK.codes.device)
    is_blockwise = a_MK.kind.is_blockwise
    scale_rows = [operand.kind.block[0] for operand in (a_MK, b_NK)]
    strides = [
        (0, 0) if kind is ScaleKind.TENSOR else (scale.stride(0), scale.stride(1) if is_blockwise else 0)
        for _, scale, kind in (a_MK, b_NK)
    ]
    _launcher(num_stages)(
        language.cdiv(num_rows, TILE_M) * language.cdiv(num_columns, TILE_N),
        a_MK.codes, a_MK.dequant_scale, *strides[0], b_NK.codes, b_NK.dequant_scale, *strides[1],
        out_MN, num_rows, num_columns, num_summed, FORMAT_NAMES[a_MK.codes.dtype], FORMAT_NAMES[b_NK.codes.dtype],
        *scale_rows, is_blockwise, TILE_M, TILE_N, a_MK.kind.block[1], TILE_GROUP,
    )  # fmt: skip
    return out_MN
