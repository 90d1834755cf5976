"""Lets `torch.nn.utils.clip_grad_norm_` clip gradients in FP8 in three launches, without making one wide.

torch's function finds the norm by `_get_total_norm` and multiplies by `_clip_grads_with_norm_`. These take a list of gradients
at once where they know all classes in it, and make six more launches on one number. Where a gradient is in FP8, ours take the
place of both, whoever has imported the function. Lists without one are torch's, and so is what ours do not take: several
devices, other subclasses such as DTensor, sparse or complex gradients, graphs of torch.compile, foreach=False.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils._foreach_utils import _foreach_supported_types

from worker import kernels
from worker.fp8.gradient import Float8Gradient

_VALUES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
Norm = Callable[..., Tensor]
Clip = Callable[..., None]


def let_torch_clip() -> None:
    """Tell torch that its functions may take a list of FP8 gradients, and put ours around the halves of its clipping. Once."""
    if Float8Gradient in _foreach_supported_types:
        return
    _foreach_supported_types.append(Float8Gradient)  # type: ignore[arg-type]  # as DTensor is: else it takes them one by one
    for name, around in (("_get_total_norm", _around_norm), ("_clip_grads_with_norm_", _around_clip)):
        if hasattr(clip_grad, name):  # else torch has changed it, and clips by foreach ops, nine launches
            setattr(clip_grad, name, around(getattr(clip_grad, name)))


def codes_of(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The codes of FP8 gradients, and the others as they are."""
    return [gradient.codes if isinstance(gradient, Float8Gradient) else gradient for gradient in gradients]


def scales_of(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The scales of FP8 gradients, and the others as they are."""
    return [gradient.dequant_scale if isinstance(gradient, Float8Gradient) else gradient for gradient in gradients]


def _are_ours(gradients: Sequence[Tensor]) -> bool:
    """Whether one is in FP8, and the kernels take all of them: codes, and plain dense values, on one device."""
    if torch.compiler.is_compiling() or not any(isinstance(gradient, Float8Gradient) for gradient in gradients):
        return False
    device = gradients[0].device
    return all(each.device == device and (isinstance(each, Float8Gradient) or _is_plain(each)) for each in gradients)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype in _VALUES and tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")


def _around_norm(torchs: Norm) -> Norm:
    @wraps(torchs)
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if foreach is False or not float(norm_type) > 0 or not _are_ours(tensors):
            return torchs(tensors, norm_type, error_if_nonfinite, foreach)
        with torch.no_grad():
            norm = kernels.total_norm(codes_of(tensors), scales_of(tensors), float(norm_type))
        return torchs([norm], norm_type, error_if_nonfinite, foreach) if error_if_nonfinite else norm  # which raises

    return get_total_norm


def _around_clip(torchs: Clip) -> Clip:
    @wraps(torchs)
    def clip_grads_with_norm_(
        parameters: Tensor | Iterable[nn.Parameter], max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        held: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        gradients: list[Any] = [parameter.grad for parameter in held if parameter.grad is not None]
        is_ours = foreach is not False and _are_ours(gradients) and _is_plain(total_norm)
        if is_ours and (total_norm.dtype, total_norm.ndim, total_norm.device) == (torch.float32, 0, gradients[0].device):
            with torch.no_grad():
                kernels.clip_(codes_of(gradients), scales_of(gradients), total_norm, float(max_norm))
        else:
            torchs(held, max_norm, total_norm, foreach)

    return clip_grads_with_norm_
