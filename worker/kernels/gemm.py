"""The scaled GEMM: CUDA's rules for FP8 operands, enforced on every device; check, op and fake.

Legend: M rows of a, N rows of b, K the summed dimension.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from octet.worker.kernels.library import define
from octet.worker.kernels.scales import ScaledCodes, ScaleKind, check_scale

ALIGNMENT = 16  # CUDA's FP8 GEMM takes K and N in multiples of this
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

Matmul = Callable[[ScaledCodes, ScaledCodes, torch.dtype, bool], Tensor]


def padded(run: Matmul) -> Matmul:
    """Pad K and N with zero codes: after scaling, so that padding never enters an amax. run: a device's own product."""

    def matmul(a_MK: ScaledCodes, b_NK: ScaledCodes, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
        num_out, num_summed = b_NK.codes.shape
        if not num_out % ALIGNMENT and not num_summed % ALIGNMENT:
            return run(a_MK, b_NK, out_dtype, fast_accumulation)
        a_codes, b_codes, b_dequant_scale = _pad_codes(a_MK.codes, 1), _pad_codes(b_NK.codes, ALIGNMENT), b_NK.dequant_scale
        if b_NK.kind.is_per_row and b_codes.shape[0] > num_out:
            b_dequant_scale = F.pad(b_dequant_scale, (0, 0, 0, b_codes.shape[0] - num_out), value=1.0)
        a_MK, b_NK = a_MK._replace(codes=a_codes), ScaledCodes(b_codes, b_dequant_scale, b_NK.kind)
        return run(a_MK, b_NK, out_dtype, fast_accumulation)[:, :num_out].contiguous()

    return matmul


def _fake_matmul(a_MK: ScaledCodes, b_NK: ScaledCodes, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    return a_MK.codes.new_empty((a_MK.codes.shape[0], b_NK.codes.shape[0]), dtype=out_dtype)


_matmul_op = define(
    "matmul(ScaledCodes a, ScaledCodes b, ScalarType out_dtype, bool fast_accumulation) -> Tensor",
    _fake_matmul,
    compose=lambda kernels: padded(kernels.matmul),
)


def matmul(
    a_MK: ScaledCodes, b_NK: ScaledCodes, out_dtype: torch.dtype = torch.float32, *, fast_accumulation: bool = False
) -> Tensor:
    """a @ b.T in out_dtype (M, N), of FP8 codes and their dequant_scales, accumulated in fp32.

    Both operands are summed over their last dimension: b is (N, K), as an nn.Linear stores its weight, so that CUDA's
    "second operand column-major" holds for a contiguous b. Any strides are taken (a transposed view of codes with a
    tensor scale is a valid operand); a kernel that needs K contiguous copies the codes itself. K and N are padded to
    multiples of 16 with zero codes.
    Scales: tensor or row with tensor or row; block 1xN with block 1xN or NxN.
    fast_accumulation: Hopper's shorter accumulator, tensor scales only; a CPU always accumulates in fp32.
    """
    _check_codes(a_MK.codes, b_NK.codes)
    check_scale(a_MK.dequant_scale, a_MK.codes.shape, a_MK.kind, "a_dequant_scale")
    check_scale(b_NK.dequant_scale, b_NK.codes.shape, b_NK.kind, "b_dequant_scale")
    _check_kinds(a_MK.kind, b_NK.kind, num_summed=a_MK.codes.shape[1])
    if fast_accumulation and not (a_MK.kind is b_NK.kind is ScaleKind.TENSOR):
        raise ValueError(f"fast_accumulation needs tensor scales; got {a_MK.kind.value} and {b_NK.kind.value}. Switch it off.")
    product: Tensor = _matmul_op(a_MK, b_NK, out_dtype, fast_accumulation)
    return product


def _check_codes(a_MK: Tensor, b_NK: Tensor) -> None:
    if a_MK.dtype not in _FP8 or b_NK.dtype not in _FP8:
        raise ValueError(f"matmul needs FP8 codes; got {a_MK.dtype} and {b_NK.dtype}. Quantize the operands first.")
    if a_MK.dtype == b_NK.dtype == torch.float8_e5m2:
        raise ValueError("matmul of E5M2 with E5M2 does not exist on CUDA. Quantize one operand to float8_e4m3fn.")
    if a_MK.ndim != 2 or b_NK.ndim != 2 or a_MK.shape[1] != b_NK.shape[1]:
        shapes = f"{tuple(a_MK.shape)} and {tuple(b_NK.shape)}"
        raise ValueError(f"matmul needs a (M, K) and b (N, K); got {shapes}. Both are summed over their last dimension.")


def _check_kinds(a_kind: ScaleKind, b_kind: ScaleKind, num_summed: int) -> None:
    if a_kind is b_kind:
        rows, columns = a_kind.block
        if rows > 1:
            raise ValueError(f"matmul needs block 1x{columns} for at least one operand; both are {rows}x{columns}.")
        return
    widths = {kind.block[1] for kind in (a_kind, b_kind) if kind.is_blockwise}
    if len(widths) > 1 or (a_kind.is_blockwise != b_kind.is_blockwise and num_summed > max(widths)):
        raise ValueError(
            f"matmul cannot combine {a_kind.value} with {b_kind.value}. Quantize both by blocks of one width, or neither."
        )


def _pad_codes(codes: Tensor, row_multiple: int) -> Tensor:
    rows, columns = -codes.shape[0] % row_multiple, -codes.shape[1] % ALIGNMENT
    if not rows and not columns:
        return codes
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)
