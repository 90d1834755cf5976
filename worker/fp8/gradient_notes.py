"""Notes on which the backward pass of an activation leaves the amax of the gradient that it writes, for the layer before it.

A layer in FP8 leaves a note on its output (`note_on`). The activation that takes the output (`note_of`) writes the output's
gradient in the backward pass and knows its amax. The layer reads it, so that it need not look for it, if the gradient that
arrives is what was written: the same memory, which nothing has changed. Where another gradient is added, or a hook changes it,
another one arrives, and the layer looks for itself. Compiled graphs have no notes.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker import kernels


class _Told(NamedTuple):
    gradient: Tensor  # kept, so that no other tensor takes its memory
    version: int
    amax: Tensor


class GradientNote:
    """What is known of the gradient of one output of a layer."""

    def __init__(self) -> None:
        self._told: _Told | None = None

    def tell(self, gradient: Tensor, amax: Tensor) -> None:
        """Note the amax, fp32 (), of a contiguous gradient."""
        self._told = _Told(gradient, gradient._version, amax)

    def take(self, gradient: Tensor) -> Tensor | None:
        """The amax of a gradient, if it is the one that was told of, perhaps in another shape. The note is then empty."""
        told, self._told = self._told, None
        if told is None or not gradient.is_contiguous():
            return None
        known = told.gradient
        is_same = (
            gradient.untyped_storage()._cdata == known.untyped_storage()._cdata
            and gradient.storage_offset() == known.storage_offset()
            and (gradient.numel(), gradient.dtype) == (known.numel(), known.dtype)
            and gradient._version == told.version
        )
        return told.amax if is_same else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing of it in the file of an output that somebody saves."""
        return OrderedDict, ()


class Notes(NamedTuple):
    """The notes of one pass of a layer. own: on its output. before: on the input of the activation that the layer computes."""

    own: GradientNote | None = None
    before: GradientNote | None = None

    def amax_of(self, grad_output: Tensor) -> Tensor | None:
        """The amax of the gradient of the layer's output, where who wrote it has told."""
        return None if self.own is None else self.own.take(grad_output)

    def before_activation(self, activation: str, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of x, of that of an activation of x, one of kernels' ACTIVATIONS."""
        if self.before is None:
            return kernels.ACTIVATIONS[activation].backward(grad, x)
        found = kernels.activate_backward(grad, x, activation)
        self.before.tell(found.input, found.input_amax)
        return found.input


def notes_of_pass(layer: Any, input: Tensor, activation: str | None) -> Notes:
    """The notes of a forward pass of a Float8Linear: its own, if the gradient is quantized with one scale, and eagerly."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return Notes()
    has_gradient = input.requires_grad or layer.weight.requires_grad
    is_read = has_gradient and layer.recipe.grad_output.kind is kernels.ScaleKind.TENSOR
    return Notes(GradientNote() if is_read else None, None if activation is None else note_of(input))


def note_on(output: Tensor, note: GradientNote | None) -> Tensor:
    """Leave a note on a layer's output. Returns the output."""
    if note is not None:
        output.octet_gradient_note = note
    return output


def note_of(output: Tensor) -> GradientNote | None:
    """The note on a layer's output; None where there is none, as on a view or a copy of it."""
    note = None if torch.compiler.is_compiling() else getattr(output, "octet_gradient_note", None)
    return note if isinstance(note, GradientNote) else None
