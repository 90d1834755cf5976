"""Normalize the rows of a tensor and find the amax of what comes out in the same pass: check, op and fake.

LayerNorm (Ba et al. 2016, arXiv 1607.06450) or RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), over the last dimension.
The backward pass is torch's own, of the statistics that the forward pass returns.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octet.worker.kernels.known_scale import KnownScale
from octet.worker.kernels.library import define
from octet.worker.kernels.reference import norm_dtype

MOST_FEATURES = 16384
"""A program of the kernel holds a row in registers."""

aten = torch.ops.aten


class Normalized(NamedTuple):
    """output (..., N). mean: fp32 (..., 1), of LayerNorm. rstd: fp32 (..., 1), the inverse root.

    amax: of the output, fp32 (). codes: of the output, where they were asked for.
    """

    output: Tensor
    mean: Tensor | None
    rstd: Tensor
    amax: Tensor
    codes: Tensor | None


class NormGradients(NamedTuple):
    """The gradients of input (..., N), weight (N) and bias (N), each in its tensor's dtype; None for what is not there."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None


def _fake_normalize(x: Tensor, _weight: Tensor | None, _bias: Tensor | None, _eps: float, *output: Any) -> list[Tensor]:
    is_layer_norm, dtype, codes_dtype, *_ = (*output, None)
    statistics = [x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for _ in range(1 + is_layer_norm)]
    codes = [] if codes_dtype is None else [x.new_empty(x.shape, dtype=codes_dtype)]
    return [x.new_empty(x.shape, dtype=dtype), *statistics, x.new_empty((), dtype=torch.float32), *codes]


_normalize_op = define(
    "normalize(Tensor x, Tensor? weight, Tensor? bias, float eps, bool is_layer_norm, ScalarType dtype, "
    "ScalarType? codes_dtype=None, int margin=0, Tensor? amax=None, Tensor? uses_amax=None) -> Tensor[]",
    _fake_normalize,
)


def normalize(
    x: Tensor,
    weight_N: Tensor | None,
    bias_N: Tensor | None,
    eps: float,
    *,
    is_layer_norm: bool,
    dtype: torch.dtype,
    known_scale: KnownScale | None = None,
) -> Normalized:
    """The rows of x (..., N), contiguous, normalized, times weight, plus bias, rounded once to dtype.

    Autograd does not follow it.
    bias: of LayerNorm. known_scale: also write codes of the output, for `complete`.
    On a CPU these are the bits of torch's own norm, in the dtype that all operands have, or else in fp32.
    The kernel of CUDA devices adds in another order: its fp32 results are within a few units in the last place, so that less
    than one E4M3 code in a thousand becomes its neighbour.
    """
    if not x.ndim or not 0 < x.shape[-1] <= MOST_FEATURES:
        raise ValueError(f"x has shape {tuple(x.shape)}; allowed: (..., N) with N up to {MOST_FEATURES}. Use torch's norm.")
    if bias_N is not None and not is_layer_norm:
        raise ValueError("an RMSNorm has no bias, and got one. Leave it out, or set is_layer_norm.")
    if torch.is_grad_enabled():  # else autograd follows nothing
        weight_N, bias_N = (None if part is None else part.detach() for part in (weight_N, bias_N))
        x = x.detach()
    output, *parts = _normalize_op(x, weight_N, bias_N, eps, is_layer_norm, dtype, *(known_scale or ()))
    mean = parts.pop(0) if is_layer_norm else None
    return Normalized(output, mean, parts[0], parts[1], None if known_scale is None else parts[2])


def normalize_backward(
    grad: Tensor, x: Tensor, weight_N: Tensor | None, bias_N: Tensor | None, found: tuple[Tensor | None, Tensor]
) -> NormGradients:
    """The gradients of a norm, as torch computes them. grad (..., N): of the output, in its dtype. found: mean and rstd."""
    mean, rstd = found
    dtype_of_x, dtype = x.dtype, norm_dtype(x, weight_N, grad.dtype)
    grad, x, weight, bias = _cast(grad, dtype), _cast(x, dtype), _cast(weight_N, dtype), _cast(bias_N, dtype)
    shape, has_weight = x.shape[-1:], weight is not None
    grad_bias = None
    if mean is not None:
        if x.is_cpu:
            mean, rstd = mean.to(dtype), rstd.to(dtype)
        mask = [True, has_weight, bias is not None]
        grad_x, grad_weight, grad_bias = aten.native_layer_norm_backward.default(grad, x, shape, mean, rstd, weight, bias, mask)
    elif x.is_cpu:  # torch has no such kernel there
        grad_x, grad_weight = _rms_norm_backward(grad, x, rstd, weight)
    else:
        grad_x, grad_weight = aten._fused_rms_norm_backward.default(grad, x, shape, rstd, weight, [True, has_weight])
    of_weight = None if weight_N is None else _cast(grad_weight, weight_N.dtype)
    return NormGradients(_cast(grad_x, dtype_of_x), of_weight, None if bias_N is None else _cast(grad_bias, bias_N.dtype))


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    """The tensor in the dtype. Where it has it, asking takes a tenth of the time of `to`."""
    return tensor if tensor is None or tensor.dtype is dtype else tensor.to(dtype)


def _rms_norm_backward(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients that autograd computes for torch's rms_norm on a CPU, bit for bit.

    There rms_norm consists of several ops. Their backward passes are computed here in the same
    order.
    """
    grad, wide = grad.float(), x.float()
    grad_weight = None if weight is None else (grad * (wide * rstd)).reshape(-1, x.shape[-1]).sum(0)
    if weight is not None:
        grad = grad * weight
    grad_rstd = (grad * wide).sum(-1, keepdim=True)
    grad_mean = -0.5 * grad_rstd * rstd.pow(3) / x.shape[-1]
    return (grad * rstd + grad_mean * (wide * 2.0)).to(x.dtype), grad_weight
