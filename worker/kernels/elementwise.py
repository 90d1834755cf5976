"""Elementwise ops: an activation that is computed a second time, the exact root, and the check for finite values."""

import torch
from torch import Tensor

from octet.worker.kernels.activations import ACTIVATIONS
from octet.worker.kernels.library import define, define_composite


def _activate_again(x: Tensor, activation: str, _after: Tensor) -> Tensor:
    return ACTIVATIONS[activation].forward(x)


_activate_again_op = define_composite(
    "activate_again(Tensor x, str activation, Tensor after) -> Tensor",
    _activate_again,
    fake=lambda x, activation, after: torch.empty_like(x),
)
_sqrt_op = define("sqrt(Tensor x) -> Tensor", fake=torch.empty_like)
_all_finite_op = define("all_finite(Tensor x) -> Tensor", fake=lambda x: x.new_empty((), dtype=torch.bool))


def activate_again(x: Tensor, activation: str, after: Tensor) -> Tensor:
    """Compute an activation again, in the backward pass. A compiler may not move it before `after` and keep the result."""
    result: Tensor = _activate_again_op(x, activation, after)
    return result


def sqrt(x: Tensor) -> Tensor:
    """The root of an fp32 tensor, correctly rounded, as IEEE arithmetic has it, so the same on every device."""
    root: Tensor = _sqrt_op(x.detach())
    return root


def all_finite(x: Tensor) -> Tensor:
    """Return a 0-dim bool on x's device: True if no element of a tensor, or of codes, is NaN or Inf. No host sync."""
    is_finite: Tensor = _all_finite_op(x.detach())
    return is_finite
