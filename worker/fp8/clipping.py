"""Lets `torch.nn.utils.clip_grad_norm_` take gradients in FP8 all at once, by foreach ops on their codes and scales.

torch's function then makes three launches, as `worker/optim/clip.py` does (`torch_clipping.py`), where it makes eight for a
model whose gradients are plain: an op for all norms, six on one number (stack, norm, add, reciprocal, product, clamp), and one
that multiplies. Nothing of torch is patched.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._foreach_utils import _foreach_supported_types

from worker.fp8.gradient import Float8Gradient


def let_torch_take_lists() -> None:
    """Tell torch that its functions may take a list of FP8 gradients, as of DTensors; else they take them one by one."""
    if Float8Gradient not in _foreach_supported_types:
        _foreach_supported_types.append(Float8Gradient)  # type: ignore[arg-type]


def note_writes(gradients: Iterable[Tensor]) -> None:
    """Let autograd know that the plain ones of some gradients were written into: below it, where ours are read, nobody does."""
    plain = [gradient for gradient in gradients if type(gradient) is not Float8Gradient and not gradient.is_inference()]
    torch.autograd.graph.increment_version(plain)


def codes_of(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The codes of FP8 gradients, and the others as they are."""
    # Of a tensor, asking for its type takes a third of the time of isinstance.
    return [gradient.codes if type(gradient) is Float8Gradient else gradient for gradient in gradients]


def scales_of(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The scales of FP8 gradients, and the others as they are."""
    return [gradient.dequant_scale if type(gradient) is Float8Gradient else gradient for gradient in gradients]
