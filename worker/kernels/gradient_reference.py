"""Plain-torch definition of the kernels on gradients, as `reference.py` is of all others: what CPUs run."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octet.worker.kernels.formats import ROUNDED_FORMATS, finite_or_nan
from octet.worker.kernels.reference import compute_amax, dequantize
from octet.worker.kernels.rounding import random_bits, stochastic_round
from octet.worker.kernels.scales import ScaledCodes, ScaleKind
from octet.worker.kernels.torch_private import foreach_mul_


def norms(gradients: Sequence[Tensor], scaled: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of each gradient. Decodes one FP8 gradient at a time."""
    return torch.stack([torch.linalg.vector_norm(_values(*pair), order) for pair in zip(gradients, scaled, strict=True)])


def total_norm(gradients: Sequence[Tensor], scaled: Sequence[Tensor], order: float) -> Tensor:
    """The norm of all gradients as one vector, from their norms in this order, as torch's `get_total_norm` has it."""
    return torch.linalg.vector_norm(norms(gradients, scaled, order), order)


def clip_(gradients: Sequence[Tensor], scaled: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """scaled ·= min(max_norm / (norm + 1e-6), 1), as torch's `clip_grads_with_norm_` has it."""
    foreach_mul_(list(scaled), (max_norm / (norm + 1e-6)).clamp(max=1.0))


def accumulate_(
    codes: Tensor,
    dequant_scale: Tensor,
    other: Tensor,
    alpha: float,
    draw: Sequence[int],
    count: Tensor | None = None,
    stride: int = 1,
) -> None:
    """codes × dequant_scale += alpha · other, at the scale of the sum, stochastically rounded.

    draw: seed, step and stream of the random numbers. count: int64 (), becomes one more; the step is step + stride · count.
    """
    total = _values(codes, dequant_scale).add_(other.float().mul(alpha))
    new_scale = finite_or_nan(compute_amax(total, ScaleKind.TENSOR), codes.dtype)
    seed, step, stream = draw
    drawn = step if count is None else count.add_(1) * stride + step
    random_numbers = random_bits(seed, drawn, stream, range(total.numel()), total.device).view(total.shape)
    codes.copy_(stochastic_round(total.div_(new_scale), ROUNDED_FORMATS[codes.dtype], random_numbers))
    dequant_scale.copy_(new_scale)


def clamp_(
    codes: Tensor,
    dequant_scale: Tensor,
    bounds: Sequence[float],
    draw: Sequence[int],
    count: Tensor | None = None,
    stride: int = 1,
) -> None:
    """codes × dequant_scale clamped to low … high, at limit times a power of two, rounded where any value is beyond."""
    low, high, limit = bounds
    values = _values(codes, dequant_scale)
    clipped, unit = values.clamp(low, high), torch.full((), limit or 1.0, device=values.device)
    amax = compute_amax(clipped, ScaleKind.TENSOR)
    is_changed, new_scale = (clipped != values).any() & amax.isfinite(), finite_or_nan(amax / unit, codes.dtype) * unit
    seed, step, stream = draw
    drawn = step if count is None else count.add_(1) * stride + step
    random_numbers = random_bits(seed, drawn, stream, range(values.numel()), values.device).view(values.shape)
    rounded = stochastic_round(clipped / new_scale, ROUNDED_FORMATS[codes.dtype], random_numbers).view(torch.uint8)
    codes.view(torch.uint8).copy_(torch.where(is_changed, rounded, codes.view(torch.uint8)))
    dequant_scale.copy_(torch.where(is_changed, new_scale, dequant_scale))


def mean_of_shards(codes_RS: Tensor, scales_R: Tensor) -> tuple[Tensor, Tensor]:
    """The fp32 mean of each rank's codes, and its amax."""
    total_S = torch.zeros(codes_RS.shape[1], device=codes_RS.device)
    for codes_S, dequant_scale in zip(codes_RS, scales_R, strict=True):
        total_S += _values(codes_S, dequant_scale)
    total_S /= codes_RS.shape[0]
    return total_S, compute_amax(total_S, ScaleKind.TENSOR)


def _values(gradient: Tensor, dequant_scale: Tensor) -> Tensor:
    """fp32 values of codes; a gradient of another dtype itself."""
    if gradient.dtype != torch.float8_e4m3fn:
        return gradient
    return dequantize(ScaledCodes(gradient, dequant_scale, ScaleKind.TENSOR), torch.float32)
