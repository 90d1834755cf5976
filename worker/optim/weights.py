"""The formats in which a weight is stored, and the optimizer's access to each.

An optimizer step walks over a parameter in runs of elements: it reads fp32 values, updates them and writes them back, once.
A scale of the whole tensor has to be known before the first run is written. It comes from a bound on the largest weight after
the step (`Rule.bound_after_step`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.fp8.weight import Float8Weight, note_write
from octet.worker.fp8.weights import encode_values, in_pieces
from octet.worker.kernels.formats import E4M3, FP16, ROUNDED_FORMATS
from octet.worker.kernels.rounding import E4M11
from octet.worker.optim.codecs import Draw, Parts

RUN_LENGTH = 1 << 15
"""Elements that are fp32 at a time: the temporaries of one run, about 2 MB, stay in a CPU's L2 cache."""


@dataclass(eq=False)
class QuantizedWeight:
    """The part of a weight of codes that is stepped: all of it, or a piece, 1-D, that shares memory with its codes.

    FP16 codes hold all that training needs. float8_e4m3fn codes also need the digits that they round away: in `residual`, INT8,
    the value's position inside the code's rounding interval, or in a master weight that the optimizer holds.
    elements: those of the piece. codes_amax: the amax of the whole weight's decoded codes, fp32 (), where no rank holds the
    whole codes for long. shard: the DTensor in the optimizer's groups; `weight` is the part that this rank holds.
    """

    weight: Float8Weight
    piece: nn.Parameter | None = None
    elements: range | None = None
    codes_amax: Tensor | None = None
    shard: Tensor | None = None

    @property
    def parameter(self) -> Tensor:
        """The tensor in the optimizer's groups."""
        if self.shard is not None:
            return self.shard
        return self.weight if self.piece is None else self.piece

    @property
    def codes(self) -> Tensor:
        return self.weight.codes if self.piece is None else self.piece.detach()

    @property
    def dequant_scale(self) -> Tensor:
        return self.weight.dequant_scale

    @property
    def amax(self) -> Tensor:
        return self.weight.values_amax

    @property
    def residual(self) -> Tensor | None:
        """The residual of what is stepped."""
        residual = self.weight.residual
        if residual is None:
            return self.weight.state.own_residual
        return residual if self.elements is None else self.select(residual)

    @property
    def needs_master(self) -> bool:
        """True if the codes alone are too coarse to be trained."""
        return self.weight.needs_master

    def select(self, whole: Tensor) -> Tensor:
        """The weight's elements of a tensor in the shape of the whole weight, 1-D; a view where strides allow it."""
        flat = whole.reshape(-1)
        return flat if self.elements is None else flat[self.elements.start : self.elements.stop]

    def note_whole_codes(self) -> None:
        """Store the amax of loaded codes while the weight has the whole of them; a new master weight needs it."""
        if self.needs_master:
            self.codes_amax = kernels.compute_amax(self._decoded(self.weight.codes, self.weight.residual))

    def values(self) -> Tensor:
        """Return the fp32 values of the codes that are stepped, in their shape."""
        return self._decoded(self.codes, self.residual)

    def whole_values(self) -> Tensor:
        """Return the fp32 values that wait for the optimizer, or those of the whole weight's codes."""
        wide = self.weight.state.wide
        return self._decoded(self.weight.codes, self.weight.residual) if wide is None else wide

    def _decoded(self, codes: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return kernels.dequantize(codes, self.dequant_scale)
        return kernels.split_dequantize(codes, residual, self.dequant_scale)


def runs(num_elements: int, length: int = RUN_LENGTH) -> Iterator[range]:
    """Consecutive runs of elements that cover a parameter."""
    for start in range(0, num_elements, length):
        yield range(start, min(start + length, num_elements))


class StoredWeight(ABC):
    """A parameter during one step of the optimizer: runs of fp32 values, read and written back."""

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes.detach()
        self.flat_codes = self.codes.reshape(-1)  # a copy where the strides allow no view

    @abstractmethod
    def read(self, elements: range) -> Tensor:
        """The fp32 values of a run, for the caller to change in place."""

    @abstractmethod
    def write(self, elements: range, values: Tensor) -> None:
        """Take back the values of a run that was read."""

    def finish(self) -> None:
        """Complete what was written."""
        if self.flat_codes.data_ptr() != self.codes.data_ptr():
            self.codes.copy_(self.flat_codes.view_as(self.codes))

    def run(self, elements: range) -> Tensor:
        """The codes of a run, as a view."""
        return self.flat_codes[elements.start : elements.stop]


class Fp32Weight(StoredWeight):
    """A plain fp32 parameter, updated where it is."""

    def read(self, elements: range) -> Tensor:
        return self.run(elements)

    def write(self, elements: range, values: Tensor) -> None:
        pass


class Bf16Weight(StoredWeight):
    """A plain parameter in bf16, or in fp16, stochastically rounded."""

    def __init__(self, parameter: Tensor, draw: Draw) -> None:
        super().__init__(parameter)
        self.draw = draw

    def read(self, elements: range) -> Tensor:
        return self.run(elements).float()

    def write(self, elements: range, values: Tensor) -> None:
        format = ROUNDED_FORMATS[self.codes.dtype]
        self.run(elements).copy_(kernels.stochastic_round(values, format, self.draw(elements)))


class CodesWeight(StoredWeight):
    """FP16 codes with one scale, stochastically rounded. A value that is not finite makes the scale NaN, and so every value."""

    format = FP16

    def __init__(self, weight: QuantizedWeight, codes: Tensor, dequant_scale: Tensor, bound: Tensor, draw: Draw) -> None:
        """codes, dequant_scale: the weight's own, or its master's. bound: no value is larger after the step."""
        super().__init__(codes)
        self.weight, self.dequant_scale, self.draw = weight, dequant_scale, draw
        self.new_scale = kernels.dequant_scale_from_amax(bound, codes.dtype, previous=dequant_scale)
        self.amax = torch.zeros((), device=codes.device)

    def read(self, elements: range) -> Tensor:
        return kernels.dequantize(self.run(elements), self.dequant_scale)

    def write(self, elements: range, values: Tensor) -> None:
        self.amax = torch.maximum(self.amax, kernels.compute_amax(values))
        self.encode(elements, values.div_(self.new_scale))

    def finish(self) -> None:
        self.dequant_scale.copy_(self.finite(self.new_scale))
        unit = 2.0 ** (
            -126 - self.format.min_exponent
        )  # rounded as the kernels have it: from the bits that are stochastically rounded
        self.weight.amax.copy_(self.amax / self.new_scale * unit / unit * self.new_scale)
        super().finish()

    def finite(self, scale: Tensor) -> Tensor:
        """The scale, or NaN."""
        return torch.where(self.amax.isfinite(), scale, torch.nan)

    def encode(self, elements: range, scaled_values: Tensor) -> None:
        """Store the codes of a run of values at the new scale."""
        self.run(elements).copy_(kernels.stochastic_round(scaled_values, FP16, self.draw(elements)))


class SplitWeight(CodesWeight):
    """E4M3 codes with one scale and an INT8 residual for each, stochastically rounded as one number."""

    format = E4M11

    def __init__(self, weight: QuantizedWeight, bound: Tensor, draw: Draw) -> None:
        super().__init__(weight, weight.codes, weight.dequant_scale, bound, draw)
        assert weight.residual is not None
        self.residual = weight.residual.view(-1)

    def read(self, elements: range) -> Tensor:
        residual = self.residual[elements.start : elements.stop]
        return kernels.split_dequantize(self.run(elements), residual, self.dequant_scale)

    def encode(self, elements: range, scaled_values: Tensor) -> None:
        codes, residual = kernels.split_encode(scaled_values, self.draw(elements))
        self.run(elements).copy_(codes)
        self.residual[elements.start : elements.stop] = residual


class MasterWeight(CodesWeight):
    """A master weight, FP16 codes with one scale; the E4M3 weight is its nearest rounding."""

    def __init__(self, weight: QuantizedWeight, master: Parts, bound: Tensor, draw: Draw) -> None:
        super().__init__(weight, master["codes"], master["dequant_scale"], bound, draw)
        self.rounded_scale = kernels.dequant_scale_from_amax(bound, E4M3.dtype, previous=weight.dequant_scale)
        self.rounded = weight.codes.detach().view(-1)

    def encode(self, elements: range, scaled_values: Tensor) -> None:
        super().encode(elements, scaled_values)
        values = kernels.dequantize(self.run(elements), self.new_scale)
        self.rounded[elements.start : elements.stop] = kernels.encode(values, self.rounded_scale, E4M3.dtype)

    def finish(self) -> None:
        super().finish()
        self.weight.dequant_scale.copy_(self.finite(self.rounded_scale))


def settle(weight: QuantizedWeight, draw: Draw) -> None:
    """Drop the fp32 result of writes into codes that need no master: what is stepped becomes its rounding.

    draw: of random numbers, to round a result stochastically that was no assignment.
    """
    state, residual = weight.weight.state, weight.residual
    wide, state.wide = state.wide, None
    assert wide is not None
    values = wide if weight.elements is None else weight.select(wide)
    if state.is_assigned:
        if residual is None:
            return  # the codes are the nearest
        encoded = encode_values(values, E4M3.dtype, has_residual=True, amax=weight.amax, dequant_scale=weight.dequant_scale)
        codes, fine = encoded.codes, encoded.residual
    else:
        scaled, numbers = values / weight.dequant_scale, draw(range(values.numel())).view(values.shape)
        if residual is None:
            codes, fine = kernels.stochastic_round(scaled, FP16, numbers), None
        else:
            codes, fine = kernels.split_encode(scaled, numbers)
    weight.codes.copy_(codes)
    if residual is not None:
        assert fine is not None
        residual.copy_(fine)
    note_write(state)


def new_master(weight: QuantizedWeight, draw: Draw | None = None) -> dict[str, Tensor]:
    """Make the master weight of E4M3 codes: flat FP16 codes with one scale, NaN where a value is not finite.

    It is made from the fp32 values that the weight was encoded from, which are released, or else from the codes. draw: rounds
    the result of a write that was no assignment stochastically.
    """
    wide = weight.weight.state.wide
    if wide is None and weight.codes_amax is not None:
        return master_of(weight, weight.values(), weight.codes_amax)
    whole = weight.whole_values().float()
    is_rounded_again = wide is not None and not weight.weight.state.is_assigned
    amax, state = kernels.compute_amax(whole), weight.weight.state
    if state.padded is not None and state.reduce_amax is not None:
        amax = state.reduce_amax(amax)
    return master_of(weight, weight.select(whole), amax, draw if is_rounded_again else None)


def master_of(weight: QuantizedWeight, values: Tensor, amax: Tensor, draw: Draw | None = None) -> dict[str, Tensor]:
    """Make the master weight of fp32 values, flat, of the elements that are stepped. amax: of the whole weight, ().

    draw: of the random numbers to round by; without it the values are rounded to nearest.
    """
    dequant_scale = kernels.finite_or_nan(amax, FP16.dtype)
    codes = torch.empty(values.shape, dtype=FP16.dtype, device=values.device)
    first = 0
    for piece, place in in_pieces(values, codes):
        if draw is None:
            place.copy_(kernels.encode(piece, dequant_scale, FP16.dtype))
        else:
            numbers = draw(range(first, first + piece.numel()))
            place.copy_(kernels.stochastic_round(piece / dequant_scale, FP16, numbers))
        first += piece.numel()
    return link_master(weight, {"codes": codes.reshape(-1), "dequant_scale": dequant_scale})


def link_master(weight: QuantizedWeight, master: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let a weight's values be those of its master from now on; what waited for it is released. Returns the master.

    For a master that was made of the weight, or saved with it.
    """
    state = weight.weight.state
    state.wide, state.has_master, state.has_new_codes, state.master = None, True, False, master
    return master


def is_stale(master: Parts, weight: QuantizedWeight) -> bool:
    """Return True if the weight was written since the master was made or loaded, and is not its rounding.

    Values that no master was made from count as written. Clears `has_new_codes`.
    """
    state = weight.weight.state
    if state.wide is not None:
        return True
    if not state.has_new_codes:
        return False
    state.has_new_codes = False
    return not is_rounding(weight, master)


def is_rounding(weight: QuantizedWeight, master: Parts) -> bool:
    """Return True if the E4M3 codes are a rounding of the master weight."""
    one_code = float(weight.dequant_scale) * 2.0 ** (E4M3.min_exponent - E4M3.mantissa_bits)
    for codes, finer_codes in in_pieces(weight.codes, master["codes"]):
        held, exact = kernels.dequantize(codes, weight.dequant_scale), kernels.dequantize(finer_codes, master["dequant_scale"])
        if not torch.allclose(held, exact, rtol=2.0**-E4M3.mantissa_bits, atol=one_code, equal_nan=True):
            return False
    return True
