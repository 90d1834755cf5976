"""An activation, which may gate another matrix (SwiGLU), written with its amax in one pass, and its gradients with theirs.

Check, op and fake. GLU variants follow Shazeer 2020, arXiv 2002.05202. Autograd follows none of these.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from worker.kernels.activations import ACTIVATIONS
from worker.kernels.library import define
from worker.kernels.reference import AMAX_STRIDE


class Activated(NamedTuple):
    """output (M, N), in the dtype of the input. amax: of the output, fp32 ()."""

    output: Tensor
    amax: Tensor


class ActivationGradients(NamedTuple):
    """The gradients of the input and of what it gates, (M, N), None where it gates nothing, and their amaxes, fp32 ()."""

    input: Tensor
    input_amax: Tensor
    gated: Tensor | None
    gated_amax: Tensor | None


def _fake_gradients(grad: Tensor, x: Tensor, gated: Tensor | None, _activation: str) -> list[Tensor]:
    gradients = [torch.empty_like(grad, memory_format=torch.contiguous_format) for _ in range(1 if gated is None else 2)]
    return [*gradients, x.new_empty((len(gradients), AMAX_STRIDE), dtype=torch.float32)]


_activate_op = define(
    "activate(Tensor x, Tensor? gated, str activation) -> Tensor[]",
    fake=lambda x, gated, activation: [
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty((), dtype=torch.float32),
    ],
)
_backward_op = define("activate_backward(Tensor grad, Tensor x, Tensor? gated, str activation) -> Tensor[]", _fake_gradients)


def activate(x_MN: Tensor, activation: str, gated_MN: Tensor | None = None) -> Activated:
    """An activation of x, one of ACTIVATIONS, times the gated matrix, if there is one, of the same shape and dtype.

    Each result is rounded to the dtype of x, as torch's two ops round it: on a CPU these are their bits. The kernel of CUDA
    devices has another exp and erf, so that fp32 results are within a few units in the last place.
    """
    _check(x_MN, activation, gated_MN, "gated")
    gated_MN = None if gated_MN is None else gated_MN.detach()
    return Activated(*_activate_op(x_MN.detach(), gated_MN, activation))


def activate_backward(grad_MN: Tensor, x_MN: Tensor, activation: str, gated_MN: Tensor | None = None) -> ActivationGradients:
    """The gradients of `activate`, as torch computes them from the same tensors. grad: of the output, in its dtype."""
    _check(x_MN, activation, grad_MN, "grad")
    _check(x_MN, activation, gated_MN, "gated")
    *gradients, amaxes = _backward_op(grad_MN, x_MN, gated_MN, activation)
    is_gate = gated_MN is not None
    return ActivationGradients(gradients[0], amaxes[0, 0], gradients[1] if is_gate else None, amaxes[1, 0] if is_gate else None)


def _check(x: Tensor, activation: str, other: Tensor | None, name: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}.")
    if other is not None and (other.shape, other.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"{name} is {tuple(other.shape)} of {other.dtype}; allowed: {tuple(x.shape)} of {x.dtype}, as x is. "
            "Bring both to one shape and dtype."
        )
