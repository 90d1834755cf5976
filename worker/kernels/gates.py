"""An activation, which may gate another matrix (SwiGLU), written with its amax in one pass, and its gradients with theirs.

Check, op and fake. GLU variants follow Shazeer 2020, arXiv 2002.05202. Autograd follows none of these.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octet.worker.kernels.activations import ACTIVATIONS
from octet.worker.kernels.known_scale import KnownScale
from octet.worker.kernels.library import define
from octet.worker.kernels.reference import AMAX_STRIDE


class Activated(NamedTuple):
    """output (M, N), in the dtype of the input. amax: of the output, fp32 (). codes: of it, where they were asked for."""

    output: Tensor
    amax: Tensor
    codes: Tensor | None


class WrittenGradient(NamedTuple):
    """A gradient (M, N), its amax, fp32 (), and codes of it, where they were asked for."""

    values: Tensor
    amax: Tensor
    codes: Tensor | None


def _fake_gradients(
    grad: Tensor,
    x: Tensor,
    gated: Tensor | None,
    _activation: str,
    codes_dtype: torch.dtype | None = None,
    _margin: int = 0,
    _amax: Tensor | None = None,
    _uses_amax: Tensor | None = None,
    gated_codes_dtype: torch.dtype | None = None,
    *_how: Any,
) -> list[Tensor]:
    gradients = [torch.empty_like(grad, memory_format=torch.contiguous_format) for _ in range(1 if gated is None else 2)]
    codes = [torch.empty_like(gradients[0], dtype=dtype) for dtype in (codes_dtype, gated_codes_dtype) if dtype is not None]
    return [*gradients, x.new_empty((len(gradients), AMAX_STRIDE), dtype=torch.float32), *codes]


def _fake_activate(
    x: Tensor, _gated: Tensor | None, _activation: str, codes_dtype: torch.dtype | None = None, *_how: Any
) -> list[Tensor]:
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    codes = [] if codes_dtype is None else [torch.empty_like(output, dtype=codes_dtype)]
    return [output, x.new_empty((), dtype=torch.float32), *codes]


_activate_op = define(
    "activate(Tensor x, Tensor? gated, str activation, ScalarType? codes_dtype=None, int margin=0, Tensor? amax=None, "
    "Tensor? uses_amax=None) -> Tensor[]",
    _fake_activate,
)
_backward_op = define(
    "activate_backward(Tensor grad, Tensor x, Tensor? gated, str activation, ScalarType? codes_dtype=None, int margin=0, "
    "Tensor? amax=None, Tensor? uses_amax=None, ScalarType? gated_codes_dtype=None, int gated_margin=0, "
    "Tensor? gated_amax=None, Tensor? gated_uses_amax=None) -> Tensor[]",
    _fake_gradients,
)
_NO_CODES = (None, 0, None, None)


def activate(
    x_MN: Tensor, activation: str, gated_MN: Tensor | None = None, *, known_scale: KnownScale | None = None
) -> Activated:
    """An activation of x, one of ACTIVATIONS, times the gated matrix, if there is one, of the same shape and dtype.

    Each result is rounded to the dtype of x, as torch's two ops round it: on a CPU these are their bits. The kernel of CUDA
    devices has another exp and erf, so that fp32 results are within a few units in the last place.
    known_scale: also write codes of the result, for `complete`.
    """
    _check(x_MN, activation, gated_MN, "gated")
    gated_MN = None if gated_MN is None else gated_MN.detach()
    output, amax, *codes = _activate_op(x_MN.detach(), gated_MN, activation, *(known_scale or ()))
    return Activated(output, amax, codes[0] if codes else None)


def activate_backward(
    grad_MN: Tensor,
    x_MN: Tensor,
    activation: str,
    gated_MN: Tensor | None = None,
    *,
    known_scales: tuple[KnownScale | None, KnownScale | None] = (None, None),
) -> list[WrittenGradient]:
    """The gradients of x, and of what it gates if it does, as torch computes them from the same tensors.

    grad: of the output, in its dtype. known_scales: for each of the two, also write codes of it, for `complete`.
    """
    _check(x_MN, activation, grad_MN, "grad")
    _check(x_MN, activation, gated_MN, "gated")
    num_gradients = 1 if gated_MN is None else 2
    wanted = known_scales[:num_gradients]
    flat = [part for one in wanted for part in one or _NO_CODES] if any(wanted) else ()
    parts = _backward_op(grad_MN, x_MN, gated_MN, activation, *flat)
    gradients, amaxes, codes = parts[:num_gradients], parts[num_gradients], iter(parts[num_gradients + 1 :])
    return [
        WrittenGradient(gradient, amaxes[index, 0], None if one is None else next(codes))
        for index, (gradient, one) in enumerate(zip(gradients, wanted, strict=True))
    ]


def _check(x: Tensor, activation: str, other: Tensor | None, name: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}.")
    if other is not None and (other.shape, other.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"{name} is {tuple(other.shape)} of {other.dtype}; allowed: {tuple(x.shape)} of {x.dtype}, as x is. "
            "Bring both to one shape and dtype."
        )
