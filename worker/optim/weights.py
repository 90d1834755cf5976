"""How a weight is stored, and what the optimizer reads and writes in its place.

An optimizer step walks over a parameter in runs of elements: it reads fp32 values, updates them and writes them back. What
has one scale for the whole tensor is encoded when the last run is written, so such a weight is wide once, by itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker import kernels
from worker.kernels.formats import E4M3, FP16, ROUNDED_FORMATS
from worker.optim.codecs import Codec, Draw, Parts

RUN_LENGTH = 1 << 15
"""Elements that are fp32 at a time: the temporaries of one run, about 2 MB, stay in a CPU's L2 cache."""


@dataclass(eq=False)
class QuantizedWeight:
    """A parameter that holds codes: `value = codes × dequant_scale`, with one fp32 scale () that is updated in place.

    fp16 codes are the weight themselves. float8_e4m3fn codes need what they round away: `residual`, INT8, the value's position
    inside the code's rounding interval, or a master weight in the optimizer. `initial_values`: fp32 values that the master
    starts from, released once it exists; without them it starts from the codes.
    """

    codes: nn.Parameter
    dequant_scale: Tensor
    residual: Tensor | None = None
    initial_values: Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dtype not in (FP16.dtype, E4M3.dtype):
            raise ValueError(f"a quantized weight has dtype {self.codes.dtype}; allowed: float16, float8_e4m3fn.")
        if self.residual is not None and (self.codes.dtype != E4M3.dtype or self.residual.dtype != torch.int8):
            raise ValueError(
                f"a residual refines float8_e4m3fn codes by int8; got {self.codes.dtype} and {self.residual.dtype}."
            )

    @property
    def needs_master(self) -> bool:
        """Whether the codes alone are too coarse to be trained."""
        return self.codes.dtype == E4M3.dtype and self.residual is None

    def values(self) -> Tensor:
        """The fp32 values, in the parameter's shape."""
        codes = self.codes.detach()
        if self.residual is None:
            return kernels.dequantize(codes, self.dequant_scale)
        return kernels.split_decode(codes, self.residual).mul_(self.dequant_scale)


def runs(num_elements: int, length: int = RUN_LENGTH) -> Iterator[range]:
    """Consecutive runs of elements that cover a parameter."""
    for start in range(0, num_elements, length):
        yield range(start, min(start + length, num_elements))


class StoredWeight(ABC):
    """What the optimizer sees of a parameter during one step."""

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


class WideWeight(StoredWeight):
    """A plain fp32 parameter, updated where it is."""

    def read(self, elements: range) -> Tensor:
        return self.run(elements)

    def write(self, elements: range, values: Tensor) -> None:
        pass


class RoundedWeight(StoredWeight):
    """A plain bf16 or fp16 parameter, stochastically rounded."""

    def __init__(self, parameter: Tensor, draw: Draw) -> None:
        super().__init__(parameter)
        self.draw = draw

    def read(self, elements: range) -> Tensor:
        return self.run(elements).float()

    def write(self, elements: range, values: Tensor) -> None:
        format = ROUNDED_FORMATS[self.codes.dtype]
        self.run(elements).copy_(kernels.stochastic_round(values, format, self.draw(elements)))


class ScaledWeight(StoredWeight):
    """FP16 codes with one scale, stochastically rounded."""

    def __init__(self, codes: Tensor, dequant_scale: Tensor, draw: Draw) -> None:
        super().__init__(codes)
        self.dequant_scale, self.draw = dequant_scale, draw
        self.values = torch.empty(self.flat_codes.shape, dtype=torch.float32, device=codes.device)
        self.amax = torch.zeros((), device=codes.device)

    def read(self, elements: range) -> Tensor:
        return kernels.dequantize(self.run(elements), self.dequant_scale)

    def write(self, elements: range, values: Tensor) -> None:
        self.values[elements.start : elements.stop] = values
        self.amax = torch.maximum(self.amax, kernels.compute_amax(values))

    def finish(self) -> None:
        new_scale = kernels.dequant_scale_from_amax(self.amax, self.codes.dtype, previous=self.dequant_scale)
        self.dequant_scale.copy_(new_scale)
        for elements in runs(self.values.numel()):
            self.encode(elements, self.values[elements.start : elements.stop].div_(new_scale))
        super().finish()

    def encode(self, elements: range, scaled_values: Tensor) -> None:
        """Store the codes of a run of values at the new scale."""
        self.run(elements).copy_(kernels.stochastic_round(scaled_values, FP16, self.draw(elements)))


class SplitWeight(ScaledWeight):
    """E4M3 codes with one scale and an INT8 residual for each, stochastically rounded as one number."""

    def __init__(self, codes: Tensor, dequant_scale: Tensor, residual: Tensor, draw: Draw) -> None:
        super().__init__(codes, dequant_scale, draw)
        self.residual = residual.view(-1)

    def read(self, elements: range) -> Tensor:
        residual = self.residual[elements.start : elements.stop]
        return kernels.split_decode(self.run(elements), residual).mul_(self.dequant_scale)

    def encode(self, elements: range, scaled_values: Tensor) -> None:
        codes, residual = kernels.split_encode(scaled_values, self.draw(elements))
        self.run(elements).copy_(codes)
        self.residual[elements.start : elements.stop] = residual


class MasteredWeight(ScaledWeight):
    """A master weight, FP16 codes with one scale, of which the E4M3 weight is the nearest rounding."""

    def __init__(self, weight: QuantizedWeight, master: Parts, draw: Draw) -> None:
        super().__init__(master["codes"], master["dequant_scale"], draw)
        self.weight = weight

    def finish(self) -> None:
        super().finish()
        round_master(self.weight, {"codes": self.codes, "dequant_scale": self.dequant_scale})


def new_master(weight: QuantizedWeight, codec: Codec) -> dict[str, Tensor]:
    """The master weight of E4M3 codes, from the fp32 values they were made of; these are released."""
    values = weight.values() if weight.initial_values is None else weight.initial_values
    weight.initial_values = None
    return dict(codec.encode(values.detach().float().reshape(-1), None))


def round_master(weight: QuantizedWeight, master: Parts) -> None:
    """Set an E4M3 weight and its scale to the nearest rounding of its master."""
    master_codes, master_scale = master["codes"], master["dequant_scale"]
    amax = master_codes.abs().amax().float() * master_scale if master_codes.numel() else master_scale * 0
    weight.dequant_scale.copy_(kernels.dequant_scale_from_amax(amax, E4M3.dtype, previous=weight.dequant_scale))
    codes = weight.codes.detach().view(-1)
    for elements in runs(codes.numel()):
        values = kernels.dequantize(master_codes[elements.start : elements.stop], master_scale)
        codes[elements.start : elements.stop] = kernels.encode(values, weight.dequant_scale, E4M3.dtype)
