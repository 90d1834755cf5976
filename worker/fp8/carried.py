"""Activations that carry what was found out about them, so that layers in FP8 need not look at them again.

Whoever computes an activation that layers quantize, such as a norm, may know its amax: `carry` ties it to the activation, as an
attribute of the tensor. The first layer that quantizes the activation leaves its codes there for the other layers that get the
same tensor: queries, keys and values; the gate and the up layer of an MLP. They then hold one copy of codes together.

A view, a copy or a cast of the activation carries nothing, and what was changed in place since does not count, so nothing that
happens in between needs attention: a layer that finds nothing quantizes for itself, to the same bits.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.fp8.operand import Codes, OperandScaling
from worker.kernels import Ahead, ScaledCodes, ScaleKind


class Written(NamedTuple):
    """Codes that were written together with an activation, for the scaling of one layer after it (delayed scaling)."""

    scaling: OperandScaling
    codes: Tensor
    ahead: Ahead

    @classmethod
    def of(cls, scaling: OperandScaling | None, codes: Tensor | None, ahead: Ahead | None) -> "Written | None":
        """None if nothing was written."""
        return None if scaling is None or codes is None or ahead is None else cls(scaling, codes, ahead)


class Taker:
    """Knows the scaling of the layer that took an activation's codes first, for which they can be written the next time."""

    scaling: OperandScaling | None = None


class Carried:
    """What is known of one activation.

    amax: fp32 (), of the activation, if it is known. version: of the tensor's content, which counts changes in place.
    written: with the activation. taker: is told the first layer that takes codes.
    """

    def __init__(self, amax: Tensor | None, version: int, written: Written | None, taker: Taker | None) -> None:
        self.amax, self.version, self.written, self.taker = amax, version, written, taker
        self.made: list[tuple[OperandScaling, Codes]] = []

    def codes_for(self, scaling: OperandScaling, input_TK: Tensor, *, rows: bool, columns: bool) -> Codes | None:
        """What a layer's scaling would make of the activation (T, K) next: codes of a layer before, or new ones.

        None if there is nothing to make, or ranks have given it codes that they have gathered. Layers share codes if they
        quantize by one recipe, and remember and sample alike. With delayed scaling the scale is then that of the first layer's
        history, which is the others' too, since they have seen the same activations.
        """
        is_given = scaling.given is not None or scaling.regather is not None
        if is_given or not (rows or columns) or not input_TK.shape[0]:
            return None
        if self.made and (shared := self.shared(scaling, rows=rows, columns=columns)) is not None:
            return shared
        if self.taker is not None and not self.made:
            self.taker.scaling = scaling
        made = scaling.write_in_graph(input_TK) if rows and columns else None
        if rows and self.amax is not None and self.written is not None and self.written.scaling is scaling:
            codes, ahead = self.written.codes.view(input_TK.shape), self.written.ahead
            made = scaling.complete(codes, input_TK, self.amax, ahead, columns=columns)
        elif made is None:
            made = scaling.quantize(input_TK, amax=self.amax, rows=rows, columns=columns, transposed_later=True)
        self.made.append((scaling, made))
        return made

    def shared(self, scaling: OperandScaling, *, rows: bool, columns: bool) -> Codes | None:
        """The codes of a layer before, if they are what the scaling would make."""
        for other, (row_codes, column_codes) in self.made:
            has_all = (row_codes is not None or not rows) and (column_codes is not None or not columns)
            if has_all and _alike(scaling, other):
                scaling.follow(other)
                return row_codes if rows else None, column_codes if columns else None
        return None

    def share(self, scaling: OperandScaling, rows: Tensor, *columns_and_scale: Tensor) -> list[Tensor]:
        """Leave codes (T, K), perhaps codes for columns (K, T), and their scale () for other layers. Returns the latter two."""
        *columns, scale = columns_and_scale
        of_columns = ScaledCodes(columns[0], scale, ScaleKind.TENSOR) if columns else None
        self.made.append((scaling, (ScaledCodes(rows, scale, ScaleKind.TENSOR), of_columns)))
        return [*columns, scale] if columns else []

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing of it in the file of an activation that somebody saves."""
        return OrderedDict, ()


def carry(activation: Tensor, amax: Tensor | None, written: Written | None = None, taker: "Taker | None" = None) -> Tensor:
    """Let an activation carry its amax, fp32 (), and codes written with it, or the place for codes alone. Returns it.

    Tensors of inference mode carry nothing: torch does not say whether they were changed.
    """
    if torch.compiler.is_compiling():
        activation.octet_carried = Carried(amax, 0, written, taker)
    elif not activation.is_inference():
        activation.octet_carried = Carried(amax, activation._version, written, taker)
    return activation


def carried_by(activation: Tensor) -> Carried | None:
    """What an activation carries; None if it carries nothing, or has changed since.

    A compiler cannot ask whether it has. Who lets activations carry something within a compiled graph knows that nothing does.
    """
    carried = getattr(activation, "octet_carried", None)
    if not isinstance(carried, Carried):
        return None
    return carried if torch.compiler.is_compiling() or carried.version == activation._version else None


def _alike(one: OperandScaling, other: OperandScaling) -> bool:
    return one.recipe is other.recipe and one.training == other.training and one.is_sampled == other.is_sampled
