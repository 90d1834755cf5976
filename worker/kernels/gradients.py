"""What is done to FP8 gradients without making them wide: their norm, adding to them, and the mean of several ranks' shards.

Each function is the plain-torch definition; on a CUDA device the kernel beside it in `cuda/gradients.py` does the same.
R ranks, S elements of one rank's shard.
"""

from types import ModuleType

import torch
from torch import Tensor

from worker.kernels.formats import E4M3, finite_or_nan
from worker.kernels.quantization import compute_amax, dequantize
from worker.kernels.rounding import random_bits, stochastic_round


def norm(codes: Tensor, dequant_scale: Tensor) -> Tensor:
    """The 2-norm of the values of E4M3 codes with one scale (); fp32 (). The order of summation is the device's."""
    if codes.is_cuda:
        return _on_cuda().norm(codes, dequant_scale)
    return torch.linalg.vector_norm(dequantize(codes, dequant_scale))


def accumulate_(codes: Tensor, dequant_scale: Tensor, other: Tensor, alpha: float, words: tuple[int, int, int]) -> None:
    """codes × dequant_scale += alpha · other, with a new scale () and stochastic rounding, in place.

    codes: E4M3, contiguous. other: fp32, bf16 or fp16 of the same shape. words: seed, step and stream of the random words.
    The scale becomes NaN where the sum is not finite.
    """
    if codes.is_cuda:
        _on_cuda().accumulate_(codes, dequant_scale, other, alpha, words)
        return
    total = dequantize(codes, dequant_scale).add_(other.float().mul(alpha))
    new_scale = finite_or_nan(compute_amax(total), E4M3.dtype)
    random_words = random_bits(*words, range(total.numel()), total.device).view(total.shape)
    codes.copy_(stochastic_round(total.div_(new_scale), E4M3, random_words))
    dequant_scale.copy_(new_scale)


def mean_of_shards(codes_RS: Tensor, scales_R: Tensor) -> tuple[Tensor, Tensor]:
    """The fp32 mean over ranks (S,) of E4M3 codes, summed in the ranks' order, and its amax ()."""
    if codes_RS.is_cuda:
        return _on_cuda().mean_of_shards(codes_RS, scales_R)
    total_S = torch.zeros(codes_RS.shape[1], device=codes_RS.device)
    for codes_S, dequant_scale in zip(codes_RS, scales_R, strict=True):
        total_S += dequantize(codes_S.contiguous(), dequant_scale)
    total_S /= codes_RS.shape[0]
    return total_S, compute_amax(total_S)


def _on_cuda() -> ModuleType:
    from worker.kernels.cuda import gradients  # loads Triton

    return gradients
