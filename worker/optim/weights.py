"""The formats in which a weight is stored, and the optimizer's access to each.

An optimizer step walks over a parameter in runs of elements: it reads fp32 values, updates them and writes them back, once.
A scale of the whole tensor has to be known before the first run is written. It comes from a bound on the largest weight after
the step (`Rule.bound_after_step`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.fp8.weights import in_pieces
from octet.worker.kernels.formats import E4M3, FP16, ROUNDED_FORMATS
from octet.worker.kernels.rounding import E4M11
from octet.worker.optim.codecs import Draw, Parts

RUN_LENGTH = 1 << 15
"""Elements that are fp32 at a time: the temporaries of one run, about 2 MB, stay in a CPU's L2 cache."""


class WeightHolder(Protocol):
    """A layer that holds a weight as codes. Its tensors may be replaced at any time, as by a move to another device."""

    weight: nn.Parameter
    weight_dequant_scale: Tensor | None
    weight_residual: Tensor | None
    weight_amax: Tensor | None
    initial_values: Tensor | None
    has_master: bool
    has_new_codes: bool


@dataclass(eq=False)
class HeldTensors:
    """A holder that is no layer; fields as in `QuantizedWeight`."""

    weight: nn.Parameter
    weight_dequant_scale: Tensor | None
    weight_residual: Tensor | None = None
    weight_amax: Tensor | None = None
    initial_values: Tensor | None = None
    has_master: bool = False
    has_new_codes: bool = False


@dataclass(eq=False)
class QuantizedWeight:
    """A parameter that holds codes: `value = codes × dequant_scale`, with one fp32 scale () that is updated in place.

    fp16 codes hold all that training needs. float8_e4m3fn codes also need the digits that they round away: in `residual`,
    INT8, the value's position inside the code's rounding interval, or in a master weight that the optimizer holds.
    amax: of the values, fp32 (), updated in place; it belongs to the codes and is saved and loaded with them.
    initial_values: fp32 values that the master starts from, released once it exists; without them it starts from the codes.

    All are read from the holder each time, so that the optimizer steps what the layer computes with.
    piece: 1-D, shares memory with the holder's weight: the `elements` of it that are stepped, where that is not all.
    """

    holder: WeightHolder
    piece: nn.Parameter | None = None
    elements: range | None = None
    own_residual: Tensor | None = None
    """The residual of a piece whose holder has none: no rank holds the whole."""
    codes_amax: Tensor | None = None
    """The amax of the whole weight's decoded codes, fp32 (), where no rank holds the whole codes for long."""

    @classmethod
    def of(
        cls,
        codes: nn.Parameter,
        dequant_scale: Tensor,
        residual: Tensor | None = None,
        amax: Tensor | None = None,
        initial_values: Tensor | None = None,
    ) -> "QuantizedWeight":
        """A weight whose tensors belong to no layer."""
        return cls(HeldTensors(codes, dequant_scale, residual, amax, initial_values))

    def __post_init__(self) -> None:
        if self.codes.dtype not in (FP16.dtype, E4M3.dtype):
            raise ValueError(f"a quantized weight has dtype {self.codes.dtype}; allowed: float16, float8_e4m3fn.")
        whole = self.own_residual if self.holder.weight_residual is None else self.holder.weight_residual
        if whole is not None and (self.codes.dtype != E4M3.dtype or whole.dtype != torch.int8):
            raise ValueError(f"a residual refines float8_e4m3fn codes by int8; got {self.codes.dtype} and {whole.dtype}.")
        if self.holder.weight_amax is None:
            self.holder.weight_amax = kernels.compute_amax(self.values())

    @property
    def codes(self) -> nn.Parameter:
        return self.holder.weight if self.piece is None else self.piece

    @property
    def dequant_scale(self) -> Tensor:
        assert self.holder.weight_dequant_scale is not None
        return self.holder.weight_dequant_scale

    @property
    def residual(self) -> Tensor | None:
        residual = self.holder.weight_residual
        if residual is None:
            return self.own_residual
        return residual if self.elements is None else self.select(residual)

    @property
    def amax(self) -> Tensor:
        assert self.holder.weight_amax is not None
        return self.holder.weight_amax

    @property
    def needs_master(self) -> bool:
        """True if the codes alone are too coarse to be trained."""
        return self.codes.dtype == E4M3.dtype and self.residual is None

    def select(self, whole: Tensor) -> Tensor:
        """The weight's elements of a tensor in the shape of the holder's weight, 1-D; a view where strides allow it."""
        flat = whole.reshape(-1)
        return flat if self.elements is None else flat[self.elements.start : self.elements.stop]

    def note_whole_codes(self) -> None:
        """Store the amax of loaded codes while the holder has the whole of them; a new master weight needs it."""
        if self.needs_master:
            self.codes_amax = kernels.compute_amax(QuantizedWeight(self.holder).values())

    def values(self) -> Tensor:
        """The fp32 values, in the parameter's shape."""
        codes = self.codes.detach()
        if self.residual is None:
            return kernels.dequantize(codes, self.dequant_scale)
        return kernels.split_dequantize(codes, self.residual, self.dequant_scale)


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


def new_master(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Make the master weight of E4M3 codes: flat FP16 codes with one scale, NaN where a value is not finite.

    It is made from the fp32 values that the weight was encoded from, which are released, or else from the codes.
    """
    holder = weight.holder
    if holder.initial_values is None and weight.codes_amax is not None:
        values, amax = weight.values(), weight.codes_amax
    else:
        whole = QuantizedWeight(holder).values() if holder.initial_values is None else holder.initial_values
        values, amax = weight.select(whole.detach().float()), kernels.compute_amax(whole.detach().float())
    return master_of(weight, values, amax)


def master_of(weight: QuantizedWeight, values: Tensor, amax: Tensor) -> dict[str, Tensor]:
    """Make the master weight of fp32 values, flat, of the elements that are stepped. amax: of the whole weight, ()."""
    holder = weight.holder
    holder.initial_values, holder.has_master, holder.has_new_codes = None, True, False
    dequant_scale = kernels.finite_or_nan(amax, FP16.dtype)
    codes = torch.empty(values.shape, dtype=FP16.dtype, device=values.device)
    for piece, place in in_pieces(values, codes):
        place.copy_(kernels.encode(piece, dequant_scale, FP16.dtype))
    return {"codes": codes, "dequant_scale": dequant_scale}


def is_stale(master: Parts, weight: QuantizedWeight) -> bool:
    """Return True if the codes were loaded since the master was made or loaded, and are not its rounding.

    Initial values that no master was made from count as loaded codes do. Clears `has_new_codes`.
    """
    if weight.holder.initial_values is not None:
        return True
    if not weight.holder.has_new_codes:
        return False
    weight.holder.has_new_codes = False
    return not is_rounding(weight, master)


def is_rounding(weight: QuantizedWeight, master: Parts) -> bool:
    """Return True if the E4M3 codes are a rounding of the master weight."""
    one_code = float(weight.dequant_scale) * 2.0 ** (E4M3.min_exponent - E4M3.mantissa_bits)
    for codes, finer_codes in in_pieces(weight.codes.detach(), master["codes"]):
        held, exact = kernels.dequantize(codes, weight.dequant_scale), kernels.dequantize(finer_codes, master["dequant_scale"])
        if not torch.allclose(held, exact, rtol=2.0**-E4M3.mantissa_bits, atol=one_code, equal_nan=True):
            return False
    return True
