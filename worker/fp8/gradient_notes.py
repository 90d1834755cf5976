"""Notes on which the backward pass of an activation leaves what it knows of a gradient that it writes, for the layer before.

A layer in FP8 leaves a note on its output (`note_on`). The activation that takes the output (`note_of`) writes the output's
gradient in the backward pass and knows its amax; with delayed scaling it writes the codes too. The layer takes them, so that
it need not read the gradient again, if the gradient that arrives is what was written: the same memory, which nothing has
changed. Where another gradient is added, or a hook changes it, another one arrives, and the layer looks for itself. Compiled
graphs have no notes (`in_graph.py`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from worker import kernels

if TYPE_CHECKING:
    from worker.fp8.operand import Codes, OperandScaling


class _Told(NamedTuple):
    gradient: Tensor  # kept, so that no other tensor takes its memory
    version: int
    amax: Tensor
    codes: Tensor | None
    ahead: kernels.Ahead | None


class GradientNote:
    """What is known of the gradient of one output of a layer."""

    def __init__(self, scaling: "OperandScaling | None" = None) -> None:
        """scaling: for which codes of the gradient's rows can be written; None where nobody wants them."""
        self._scaling = scaling
        self._told: _Told | None = None

    def ahead(self) -> kernels.Ahead | None:
        """How to write codes with the gradient; None where none are wanted, or no scale is known before."""
        return None if self._scaling is None else self._scaling.ahead()

    def tell(self, gradient: kernels.WrittenGradient, ahead: kernels.Ahead | None) -> None:
        """Note what is known of a contiguous gradient. ahead: how its codes were written, if they were."""
        self._told = _Told(gradient.values, gradient.values._version, gradient.amax, gradient.codes, ahead)

    def take(self, gradient: Tensor) -> _Told | None:
        """What is known of a gradient, if it is the one that was told of, perhaps in another shape. The note is then empty."""
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
        return told if is_same else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing of it in the file of an output that somebody saves."""
        return OrderedDict, ()


class Notes(NamedTuple):
    """The notes of one pass of a layer. own: on its output. before: on the input of the activation that the layer computes."""

    own: GradientNote | None = None
    before: GradientNote | None = None

    def amax_of(self, grad_output: Tensor) -> Tensor | None:
        """The amax of the gradient of the layer's output, where who wrote it has told."""
        told = None if self.own is None else self.own.take(grad_output)
        return None if told is None else told.amax

    def quantize(self, scaling: "OperandScaling", grad_output: Tensor, *, rows: bool, columns: bool) -> "Codes":
        """What `scaling.quantize` makes of the gradient of the layer's output, of what is known of it."""
        told = None if self.own is None or scaling.given is not None else self.own.take(grad_output)
        if told is not None and told.codes is not None and told.ahead is not None and rows:
            codes = told.codes.view(grad_output.shape)
            return scaling.complete(codes, grad_output, told.amax, told.ahead, columns=columns)
        return scaling.quantize(grad_output, amax=None if told is None else told.amax, rows=rows, columns=columns)

    def before_activation(self, activation: str, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of x, of that of an activation of x, one of kernels' ACTIVATIONS."""
        if self.before is None:
            return kernels.ACTIVATIONS[activation].backward(grad, x)
        return write_gradients(grad, x, activation, None, (self.before, None))[0]


_NO_NOTES = Notes()


def write_gradients(
    grad: Tensor, x: Tensor, activation: str, gated: Tensor | None, notes: Sequence[GradientNote | None]
) -> list[Tensor]:
    """The gradients of x, and of what an activation of x gates, told on the note of each."""
    first, second = (None if note is None else note.ahead() for note in notes)
    found = kernels.activate_backward(grad, x, activation, gated, ahead=(first, second))
    for note, gradient, ahead in zip(notes, found, (first, second), strict=False):
        if note is not None:
            note.tell(gradient, ahead)
    return [gradient.values for gradient in found]


def notes_of_pass(layer: Any, input: Tensor, activation: str | None) -> Notes:
    """The notes of a forward pass of a Float8Linear: its own, if the gradient is quantized with one scale, and eagerly."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _NO_NOTES
    note, goes_on = None, input.requires_grad
    if (goes_on or layer.weight.requires_grad) and layer.recipe.grad_output.kind is kernels.ScaleKind.TENSOR:
        wants_rows = goes_on and "grad_input" not in layer.high_precision
        note = GradientNote(layer._modules["grad_output_scaling"] if wants_rows else None)
    return Notes(note, None if activation is None else note_of(input))


def note_on(output: Tensor, note: GradientNote | None) -> Tensor:
    """Leave a note on a layer's output. Returns the output."""
    if note is not None:
        output.octet_gradient_note = note
    return output


def note_of(output: Tensor) -> GradientNote | None:
    """The note on a layer's output; None where there is none, as on a view or a copy of it."""
    note = None if torch.compiler.is_compiling() else getattr(output, "octet_gradient_note", None)
    return note if isinstance(note, GradientNote) else None
