"""The scaled GEMM: CUDA's rules for FP8 operands, enforced on every device, and the padding that meets them.

Legend: M rows of a, N rows of b, K the summed dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kernels.dispatch import implementation
from worker.kernels.formats import BLOCK, scale_shape

ALIGNMENT = 16  # CUDA's FP8 GEMM takes K and N in multiples of this
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCK_KINDS = ("block 1x128", "block 128x128")


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
    tensor scale is a valid operand); a kernel that needs K contiguous copies the codes itself. K and N are padded here
    to multiples of 16 with zero codes.
    Scales: tensor or row with tensor or row; block 1x128 with block 1x128 or 128x128.
    fast_accumulation: Hopper's shorter accumulator, tensor scales only; a CPU always accumulates in fp32.
    """
    _check_codes(a_MK, b_NK)
    kinds = (_scale_kind("a", a_dequant_scale, a_MK), _scale_kind("b", b_dequant_scale, b_NK))
    _check_kinds(kinds, num_blocks=-(-a_MK.shape[1] // BLOCK))
    if fast_accumulation and kinds != ("tensor", "tensor"):
        raise ValueError(f"fast_accumulation needs tensor scales; got {kinds[0]} and {kinds[1]}. Switch it off.")
    num_out = b_NK.shape[0]
    a_MK, b_NK = _pad_codes(a_MK, 1), _pad_codes(b_NK, ALIGNMENT)
    if kinds[1] in ("row", "block 1x128"):
        b_dequant_scale = F.pad(b_dequant_scale, (0, 0, 0, b_NK.shape[0] - num_out), value=1.0)
    out_MN = implementation(a_MK.device).matmul(a_MK, a_dequant_scale, b_NK, b_dequant_scale)[:, :num_out]
    if bias_N is not None:
        out_MN = out_MN.add_(bias_N)
    return out_MN.to(out_dtype).contiguous()


def _check_codes(a_MK: Tensor, b_NK: Tensor) -> None:
    if a_MK.dtype not in _FP8 or b_NK.dtype not in _FP8:
        raise ValueError(f"matmul needs FP8 codes; got {a_MK.dtype} and {b_NK.dtype}. Quantize the operands first.")
    if a_MK.dtype == b_NK.dtype == torch.float8_e5m2:
        raise ValueError("matmul of E5M2 with E5M2 does not exist on CUDA. Quantize one operand to float8_e4m3fn.")
    if a_MK.ndim != 2 or b_NK.ndim != 2 or a_MK.shape[1] != b_NK.shape[1]:
        shapes = f"{tuple(a_MK.shape)} and {tuple(b_NK.shape)}"
        raise ValueError(f"matmul needs a (M, K) and b (N, K); got {shapes}. Both are summed over their last dimension.")


def _scale_kind(name: str, dequant_scale: Tensor, codes: Tensor) -> str:
    if dequant_scale.ndim == 0:
        return "tensor"
    kinds = [  # where two have the same shape they mean the same, and the first is taken
        ("row", scale_shape(codes.shape, "row")),
        (_BLOCK_KINDS[0], scale_shape(codes.shape, "block", (1, BLOCK))),
        (_BLOCK_KINDS[1], scale_shape(codes.shape, "block", (BLOCK, BLOCK))),
    ]
    shape = tuple(dequant_scale.shape)
    for kind, expected in kinds:
        if shape == expected:
            return kind
    allowed = "; ".join(f"{kind} {expected}" for kind, expected in kinds)
    raise ValueError(f"{name}_dequant_scale is {shape} for codes {tuple(codes.shape)}; allowed: tensor (); {allowed}.")


def _check_kinds(kinds: tuple[str, str], num_blocks: int) -> None:
    num_blockwise = sum(kind in _BLOCK_KINDS for kind in kinds)
    if kinds == (_BLOCK_KINDS[1], _BLOCK_KINDS[1]):
        raise ValueError("matmul needs block 1x128 for at least one operand; both are 128x128.")
    if num_blockwise == 1 and num_blocks > 1:
        raise ValueError(f"matmul cannot combine {kinds[0]} with {kinds[1]}. Quantize both by block, or neither.")


def _pad_codes(codes: Tensor, row_multiple: int) -> Tensor:
    """Codes extended with zero codes. This is after scaling, so padding never enters an amax."""
    rows, columns = -codes.shape[0] % row_multiple, -codes.shape[1] % ALIGNMENT
    if not rows and not columns:
        return codes
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)
