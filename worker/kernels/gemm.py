"""The scaled GEMM: CUDA's rules for FP8 operands, enforced on every device.

Legend: M rows of a, N rows of b, K the summed dimension.
"""

import torch
from torch import Tensor

from worker.kernels import ops
from worker.kernels.formats import BLOCK, kind_of_scale

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def matmul(
    a_MK: Tensor,
    a_dequant_scale: Tensor,
    b_NK: Tensor,
    b_dequant_scale: Tensor,
    out_dtype: torch.dtype = torch.float32,
    *,
    bias_N: Tensor | None = None,
    fast_accumulation: bool = False,
) -> Tensor:
    """a @ b.T + bias in out_dtype (M, N), of FP8 codes and their dequant_scales, accumulated in fp32.

    Both operands are summed over their last dimension: b is (N, K), as an nn.Linear stores its weight, so that CUDA's
    "second operand column-major" holds for a contiguous b. Any strides are taken (a transposed view of codes with a
    tensor scale is a valid operand); a kernel that needs K contiguous copies the codes itself. K and N are padded to
    multiples of 16 with zero codes.
    Scales: tensor or row with tensor or row; block 1x128 with block 1x128 or 128x128.
    fast_accumulation: Hopper's shorter accumulator, tensor scales only; a CPU always accumulates in fp32.
    """
    _check_codes(a_MK, b_NK)
    a_kind = kind_of_scale(a_dequant_scale, a_MK.shape, "a_dequant_scale")
    b_kind = kind_of_scale(b_dequant_scale, b_NK.shape, "b_dequant_scale")
    _check_kinds((a_kind, b_kind), num_blocks=-(-a_MK.shape[1] // BLOCK))
    if fast_accumulation and (a_kind, b_kind) != ("tensor", "tensor"):
        raise ValueError(f"fast_accumulation needs tensor scales; got {a_kind} and {b_kind}. Switch it off.")
    product_dtype = out_dtype if bias_N is None else torch.float32
    out_MN = ops.matmul(a_MK, a_dequant_scale, b_NK, b_dequant_scale, product_dtype, fast_accumulation)
    return out_MN if bias_N is None else out_MN.add_(bias_N).to(out_dtype)


def _check_codes(a_MK: Tensor, b_NK: Tensor) -> None:
    if a_MK.dtype not in _FP8 or b_NK.dtype not in _FP8:
        raise ValueError(f"matmul needs FP8 codes; got {a_MK.dtype} and {b_NK.dtype}. Quantize the operands first.")
    if a_MK.dtype == b_NK.dtype == torch.float8_e5m2:
        raise ValueError("matmul of E5M2 with E5M2 does not exist on CUDA. Quantize one operand to float8_e4m3fn.")
    if a_MK.ndim != 2 or b_NK.ndim != 2 or a_MK.shape[1] != b_NK.shape[1]:
        shapes = f"{tuple(a_MK.shape)} and {tuple(b_NK.shape)}"
        raise ValueError(f"matmul needs a (M, K) and b (N, K); got {shapes}. Both are summed over their last dimension.")


def _check_kinds(kinds: tuple[str, str], num_blocks: int) -> None:
    num_blockwise = sum(kind.startswith("block") for kind in kinds)
    if kinds == ("block 128x128", "block 128x128"):
        raise ValueError("matmul needs block 1x128 for at least one operand; both are 128x128.")
    if num_blockwise == 1 and num_blocks > 1:
        raise ValueError(f"matmul cannot combine {kinds[0]} with {kinds[1]}. Quantize both by block, or neither.")
