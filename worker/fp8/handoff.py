"""Pass the amax and the codes of a tensor from the op that wrote it to the layers that quantize it.

A norm, a gate or an activation finds the amax of its output. With delayed scaling it also writes codes of the output,
at the scale that past steps give. It leaves a `Handoff` on the output (`attach`). The first layer that quantizes the
output leaves its codes there for the others: queries, keys and values share one copy, and so do the gate and the up
layer of an MLP. In the other direction a layer leaves a `Handoff` on its own output, and the activation that takes the
output records there the amax and codes of the output's gradient (`write_gradients`).

A layer calls one method, `recorded`: the amax of a tensor, and codes that were written with it. There are two
implementations. In eager code (`Handoff`) modules have recorded them. A view, a copy or a cast has no handoff, and a
record does not count once the tensor was changed in place; the layer then computes the amax itself, to the same bits.
In a graph of torch.compile (`GraphHandoff`) they are computed where the tensor is made, by ops of torch that the
compiler joins to the writing kernel: a norm with the addition before it, a gate, the sum of two gradients. They are the
amax and the codes of the tensor as it is written, not of the wider values that the compiler holds: the largest of the
rounded values is the largest value, rounded, and codes are made from values that are rounded first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.kernels import KnownScale, ScaledCodes
from octet.worker.kernels.formats import SCALED_FORMATS, dequant_scale_from_amax
from octet.worker.kernels.torch_private import key_of_storage, version_of

Codes = tuple[ScaledCodes | None, ScaledCodes | None]
"""The codes of one operand for products over its rows and over its columns; None for a side that is not wanted."""


class Recorded(NamedTuple):
    """The record of a tensor. amax: fp32 (). codes: for products over its rows, written with it at known_scale."""

    amax: Tensor | None = None
    codes: Tensor | None = None
    known_scale: KnownScale | None = None


NOTHING = Recorded()


class Consumer(Protocol):
    """The scaling of a layer that takes a tensor: `operand.OperandScaling`."""

    finds_amax: bool
    """True if codes have one scale, computed from the amax of the tensor at hand."""
    is_written_in_graph: bool

    def known_scale(self) -> KnownScale | None:
        """Return the scale for writing the next operand's codes with its values; None if it is not known before."""

    def is_like(self, other: Any) -> bool:
        """Return True if both make the same codes of one tensor, and remember and sample alike."""

    def follow(self, other: Any) -> None:
        """Remember and sample what the other has quantized."""


class NextConsumer:
    """The scaling of the layer that quantized a module's last output first: the one for which to write the next codes."""

    scaling: Consumer | None = None


class Handoff:
    """The record that eager modules made of one tensor, and the codes that layers have made of it."""

    def __init__(
        self, consumer: Consumer | None = None, next_consumer: NextConsumer | None = None, *, is_shared: bool = True
    ) -> None:
        """consumer: the scaling to write codes for. is_shared: layers that take the same tensor share codes.

        next_consumer: is set to the scaling of the first layer that quantizes the tensor.
        """
        self.consumer, self.next_consumer, self.is_shared = consumer, next_consumer, is_shared
        self.made: list[tuple[Any, Codes]] = []
        self.version = 0
        self._recorded = NOTHING
        self._gradient: Tensor | None = None

    def known_scale(self) -> KnownScale | None:
        """Return the scale at which the op that writes the tensor also writes codes; None if none are wanted."""
        return None if self.consumer is None else self.consumer.known_scale()

    def record(self, recorded: Recorded, gradient: Tensor | None = None) -> None:
        """Set the record of the tensor.

        gradient: the tensor itself, contiguous, if autograd may pass it on as another object.
        """
        self._recorded, self._gradient = recorded, gradient
        if gradient is not None:
            self.version = version_of(gradient)

    def recorded(self, x: Tensor, consumer: Consumer, activation: str | None = None, *, is_whole: bool = True) -> Recorded:
        """Return the record of x (M, N), with codes only if they were written for this consumer.

        The record of a gradient can be read once. activation: one of kernels' ACTIVATIONS; the amax
        is then that of its result for x. is_whole: codes are wanted for rows and columns.
        """
        known, written = self._recorded, self._gradient
        if written is not None:
            self._recorded, self._gradient = NOTHING, None
            if not self._is_same(written, x):
                return NOTHING
        return known if self.consumer is consumer else Recorded(known.amax)

    def shared(self, consumer: Consumer, *, rows: bool, columns: bool) -> Codes | None:
        """Return codes that another layer has made, if this scaling would make the same; else None.

        With delayed scaling their scale comes from the first layer's history. The other layers have
        the same history, since they have quantized the same tensors.
        """
        for other, (row_codes, column_codes) in self.made:
            has_all = (row_codes is not None or not rows) and (column_codes is not None or not columns)
            if has_all and consumer.is_like(other):
                consumer.follow(other)
                return row_codes if rows else None, column_codes if columns else None
        return None

    def share(self, consumer: Consumer, codes: Codes) -> None:
        """Store the codes that a layer has made, for the other layers."""
        if not self.is_shared:
            return
        if self.next_consumer is not None and not self.made:
            self.next_consumer.scaling = consumer
        self.made.append((consumer, codes))

    def _is_same(self, written: Tensor, x: Tensor) -> bool:
        """Return True if a gradient is the one that was written: the same memory, unchanged, perhaps reshaped."""
        return (
            x.is_contiguous()
            and key_of_storage(x.untyped_storage()) == key_of_storage(written.untyped_storage())
            and x.storage_offset() == written.storage_offset()
            and (x.numel(), x.dtype) == (written.numel(), written.dtype)
            and version_of(x) == self.version
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty OrderedDict, so that the file of a saved tensor holds nothing of the handoff."""
        return OrderedDict, ()


class GraphHandoff(Handoff):
    """The handoff in a graph of torch.compile: the graph computes amax and codes where the tensor is made."""

    def recorded(self, x: Tensor, consumer: Consumer, activation: str | None = None, *, is_whole: bool = True) -> Recorded:
        if consumer.finds_amax:
            return Recorded(amax_in_graph(x, activation))
        is_written = is_whole and activation is None and (self.is_shared or consumer.is_written_in_graph)
        if not is_written or x.dtype not in (torch.float32, torch.bfloat16):
            return NOTHING
        known_scale, amax = consumer.known_scale(), amax_in_graph(x)
        if known_scale is None or amax is None:
            return NOTHING
        return Recorded(amax, codes_in_graph(x, known_scale), known_scale)


def attach(activation: Tensor, handoff: Handoff) -> Tensor:
    """Leave a handoff on an activation. Returns the activation.

    Tensors of inference mode get none: torch does not count changes to them.
    """
    if torch.compiler.is_compiling():
        activation.octet_handoff = handoff
    elif not activation.is_inference():
        handoff.version = version_of(activation)
        activation.octet_handoff = handoff
    return activation


def attach_place(activation: Tensor) -> Tensor:
    """Leave an empty handoff on an activation, for the codes that its layers share. Returns the activation."""
    return attach(activation, GraphHandoff() if torch.compiler.is_compiling() else Handoff())


def handoff_of(activation: Tensor) -> Handoff | None:
    """Return the handoff on an activation; None if there is none, or if the activation was changed since.

    A compiled graph cannot detect such a change, so only outputs that nothing changes get a handoff
    there. An activation without one gets a new `GraphHandoff` that is not shared.
    """
    handoff = getattr(activation, "octet_handoff", None)
    if torch.compiler.is_compiling():
        return handoff if isinstance(handoff, Handoff) else GraphHandoff(is_shared=False)
    return handoff if isinstance(handoff, Handoff) and handoff.version == version_of(activation) else None


def attach_gradient(output: Tensor, handoff: Handoff | None) -> Tensor:
    """Leave a handoff for the gradient of a layer's output on the output. Returns the output."""
    if handoff is not None and not isinstance(handoff, GraphHandoff):
        output.octet_gradient_handoff = handoff
    return output


def gradient_handoff_of(output: Tensor) -> Handoff | None:
    """Return the handoff for the gradient of a layer's output; None where there is none, as on a view or a copy."""
    handoff = None if torch.compiler.is_compiling() else getattr(output, "octet_gradient_handoff", None)
    return handoff if isinstance(handoff, Handoff) else None


def write_gradients(
    grad: Tensor, x: Tensor, activation: str, gated: Tensor | None, handoffs: Sequence[Handoff | None]
) -> list[Tensor]:
    """Return the gradients of x and of `gated`, which activation(x) multiplies; record each on its handoff."""
    first, second = (None if handoff is None else handoff.known_scale() for handoff in handoffs)
    found = kernels.activate_backward(grad, x, activation, gated, known_scales=(first, second))
    for handoff, gradient, known_scale in zip(handoffs, found, (first, second), strict=False):
        if handoff is not None:
            handoff.record(Recorded(gradient.amax, gradient.codes, known_scale), gradient.values)
    return [gradient.values for gradient in found]


def amax_in_graph(x_MN: Tensor, activation: str | None = None) -> Tensor | None:
    """Return the largest magnitude of a matrix, fp32 (), as `kernels.compute_amax` does; None outside of compiled graphs.

    It is found in two steps, for each row and then for all rows: the compiler computes the first
    with the tensor. activation: one of kernels' ACTIVATIONS, applied to the matrix first. The amax
    may then differ by a unit in the last place from that of our kernel, which computes exp
    differently. Scales are powers of two, so the difference matters only at the boundary between
    two of them.
    """
    if not torch.compiler.is_compiling() or not x_MN.numel():
        return None
    values = x_MN.detach() if activation is None else kernels.ACTIVATIONS[activation].forward(x_MN.detach())
    amax = values.abs().amax(-1).amax()
    # A cast that changes nothing is an alias, and Dynamo hands no alias from a forward pass to its backward pass.
    return amax if amax.dtype == torch.float32 else amax.float()


def codes_in_graph(x_MN: Tensor, known_scale: KnownScale) -> Tensor:
    """Return codes of a matrix in fp32 or bf16 at a known scale, for `kernels.complete`."""
    values = x_MN.detach().float()
    if x_MN.dtype == torch.bfloat16:  # what the compiler holds of it is fp32, and a cast to bf16 and back is nothing to it
        bits = values.view(torch.int32)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000).view(torch.float32)
        values = torch.where(values.isfinite(), rounded, torch.nan)
    limit = SCALED_FORMATS[known_scale.dtype].max
    quant_scale = dequant_scale_from_amax(known_scale.amax, known_scale.dtype, known_scale.margin).reciprocal()
    scaled = torch.where(values.isfinite(), values, torch.nan) * quant_scale
    return scaled.clamp(-limit, limit).to(known_scale.dtype)
