"""Named codecs for optimizer states: they convert between fp32 values and tensors of codes and scales.

A codec sees a run of consecutive elements of the flattened parameter that starts at a multiple of 128. Everything is IEEE
arithmetic that any device repeats bit for bit; no logarithm or power is taken at run time. `api_schemas/formats.py` has the
bytes of each.

    value = codes                                              fp32
    value = codes × dequant_scale                              fp16-block
    value = sign · dequant_scale less depth(codes) · steps / 2^17 binades: fp8-dre, dynamic range expansion (see the class)
    value = sign · (codes · fp32(1 / 127))⁴ × dequant_scale    int8-companded
    value = (codes · fp32(1 / 255))⁴ × dequant_scale           uint8-companded, for second moments: values without sign
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octet.worker import kernels
from octet.worker.kernels.formats import BLOCK, E4M3

Parts = Mapping[str, Tensor]
Draw = Callable[[range], Tensor]
"""Random numbers of 16 bits, as int32, for a run of elements."""

E4M3_MAX_BITS = 0x43E00000
"""The bits of 448 as an fp32."""
TINY = torch.finfo(torch.float32).tiny
TINY_BITS = 0x00800000


@dataclass(frozen=True)
class Part:
    """One tensor of a stored state; `num_elements` consecutive elements of the parameter share an entry."""

    dtype: torch.dtype
    num_elements: int = 1

    def shape(self, num_elements: int) -> tuple[int, ...]:
        """The shape of the tensor for a parameter of that many elements."""
        return (-(-num_elements // self.num_elements),)

    def select(self, stored: Tensor, elements: range) -> Tensor:
        """The entries for a run of elements, as a view."""
        return stored[elements.start // self.num_elements : -(-elements.stop // self.num_elements)]


class Codec(ABC):
    """A way to store fp32 values: which tensors, and how they are filled and read."""

    draws = False  # whether encode rounds stochastically and needs random numbers

    def __init__(self, **parts: Part) -> None:
        self.parts = parts

    @abstractmethod
    def decode(self, stored: Parts) -> Tensor:
        """The fp32 values, 1-D; may be the stored tensor itself."""

    @abstractmethod
    def encode(self, values: Tensor, random_numbers: Tensor | None) -> Parts:
        """The parts for fp32 values, 1-D. random_numbers: one per element, if the codec draws."""

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of a stored state, scales included."""
        return sum(torch.Size(part.shape(num_elements)).numel() * part.dtype.itemsize for part in self.parts.values())


class Fp32(Codec):
    def decode(self, stored: Parts) -> Tensor:
        return stored["codes"]

    def encode(self, values: Tensor, random_numbers: Tensor | None) -> Parts:
        return {"codes": values}


class Fp16(Codec):
    """FP16 codes at a power-of-two scale for each block of 128; NaN where a value is not finite."""

    def decode(self, stored: Parts) -> Tensor:
        return kernels.dequantize(stored["codes"], stored["dequant_scale"])

    def encode(self, values: Tensor, random_numbers: Tensor | None) -> Parts:
        dequant_scale = kernels.finite_or_nan(kernels.compute_amax(values, "block"), torch.float16)
        return {"codes": kernels.encode(values, dequant_scale, torch.float16), "dequant_scale": dequant_scale}


class DynamicRangeExpansion(Codec):
    """E4M3 codes with the dynamic range of their block: a block that spans few binades gives its spare range for precision.

    The idea is COAT's (arXiv 2410.19313); theirs is a power of the values, ours a step between codes.

    In E4M3, a code lies q eighths of a binade below the largest, 126; here, q steps below the block's amax (piecewise
    linearly, as floating-point numbers are). A step is `steps` 2^17ths of a binade. It is as small as the smallest element of
    the block allows: that element gets the last code, 142 steps down, so none is lost to the gain of the others. A step is at
    most an eighth of a binade, as in E4M3 itself.
    Integer arithmetic on the numbers' bits, so any device repeats it. Chosen by measurement (docs/log.md).
    """

    LARGEST = 126
    DEEPEST = 142
    UNIT = 1 << 6  # of a step, in an fp32's bits: steps fit into an INT16
    MIN_STEPS, MAX_STEPS = 514, 1 << 14  # a 255th and an eighth of a binade
    HELD = 128 << 23  # below amax; a smaller number becomes zero

    def decode(self, stored: Parts) -> Tensor:
        codes = _blocks(stored["codes"].view(torch.uint8)).to(torch.int32)
        code = codes & 0x7F
        depth = self.LARGEST - code
        for offset, slope in ((134, 2), (142, 4), (150, 8)):  # E4M3's subnormal codes lie further and further apart
            depth = torch.maximum(depth, offset - slope * code)
        step = stored["steps"].to(torch.int32).mul_(self.UNIT).unsqueeze(1)
        bits = stored["dequant_scale"].view(torch.int32).unsqueeze(1) - depth.mul_(step)
        bits.mul_(code.clamp_(max=1)).bitwise_or_(codes.bitwise_and_(0x80).bitwise_left_shift_(24))
        return bits.view(torch.float32).view(-1)[: stored["codes"].numel()]

    def encode(self, values: Tensor, random_numbers: Tensor | None) -> Parts:
        bits = _blocks(values).view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        amax = magnitude.amax(1, keepdim=True)
        is_held = (magnitude >= (amax - self.HELD).clamp_(min=TINY_BITS)).to(torch.int32)
        below_amax = amax - magnitude
        deepest = (below_amax * is_held).amax(1, keepdim=True)
        unit = self.DEEPEST * self.UNIT
        steps = (deepest + (unit - 1)).floor_divide_(unit).clamp_(self.MIN_STEPS, self.MAX_STEPS)
        below_largest = (below_amax >> 11).mul_((2.0**25 / steps.float()).round_().to(torch.int32))  # E4M3's steps are 2^20
        expanded = (E4M3_MAX_BITS - below_largest).mul_(is_held).bitwise_or_(bits & -0x80000000)
        return {
            "codes": expanded.view(torch.float32).to(E4M3.dtype).view(-1)[: values.numel()],
            "dequant_scale": amax.view(torch.float32).view(-1),
            "steps": steps.to(torch.int16).view(-1),
        }


class Companded(Codec):
    """Integers spaced by their fourth power: 1.6 % of the value near amax at 127 levels; below amax / 2^32, zero.

    draws: round stochastically. To nearest, a second moment at beta2 = 0.999 stalls (docs/log.md).
    """

    def __init__(self, num_levels: int, draws: bool, **parts: Part) -> None:
        super().__init__(**parts)
        self.num_levels, self.draws = num_levels, draws

    def decode(self, stored: Parts) -> Tensor:
        root = _blocks(stored["codes"].float()).mul_(1 / self.num_levels)
        values = root.square().square_().mul_(stored["dequant_scale"].unsqueeze(1))
        return values.copysign_(root).view(-1)[: stored["codes"].numel()]

    def encode(self, values: Tensor, random_numbers: Tensor | None) -> Parts:
        blocks = _blocks(values)
        magnitude = blocks.abs()
        amax = magnitude.amax(1, keepdim=True)
        ratio = magnitude.mul_(1 / amax.clamp(TINY, 1 / TINY))
        root = kernels.sqrt(kernels.sqrt(ratio)).copysign_(blocks).view(-1)[: values.numel()]
        if random_numbers is None:
            levels = root.mul_(self.num_levels).round_().clamp_(-self.num_levels, self.num_levels)
        else:
            position = random_numbers.float().mul_(2.0**-16)
            levels = root.mul_(self.num_levels).add_(position).floor_().clamp_(max=self.num_levels)
        return {"codes": levels.to(self.parts["codes"].dtype), "dequant_scale": amax.view(-1)}


_PER_BLOCK = Part(torch.float32, BLOCK)
CODECS: Mapping[str, Codec] = {
    "fp32": Fp32(codes=Part(torch.float32)),
    "fp16-block": Fp16(codes=Part(torch.float16), dequant_scale=_PER_BLOCK),
    "fp8-dre": DynamicRangeExpansion(codes=Part(E4M3.dtype), dequant_scale=_PER_BLOCK, steps=Part(torch.int16, BLOCK)),
    "int8-companded": Companded(127, draws=False, codes=Part(torch.int8), dequant_scale=_PER_BLOCK),
    "uint8-companded": Companded(255, draws=True, codes=Part(torch.uint8), dequant_scale=_PER_BLOCK),
}


class StoredState:
    """A state of one parameter, read and written by runs of elements that start at multiples of 128."""

    def __init__(self, codec: Codec, parts: Parts, draw: Draw) -> None:
        self.codec, self.parts, self.draw = codec, parts, draw

    def read(self, elements: range) -> Tensor:
        """The fp32 values of a run, for the caller to change in place."""
        return self.codec.decode(self._select(elements))

    def write(self, elements: range, values: Tensor) -> None:
        """Store the values of a run."""
        encoded = self.codec.encode(values, self.draw(elements) if self.codec.draws else None)
        for name, stored in self._select(elements).items():
            stored.copy_(encoded[name])

    def _select(self, elements: range) -> dict[str, Tensor]:
        return {name: part.select(self.parts[name], elements) for name, part in self.codec.parts.items()}


def zeros(codec: Codec, num_elements: int, device: torch.device) -> dict[str, Tensor]:
    """A stored state of zeros."""
    return {name: torch.zeros(part.shape(num_elements), dtype=part.dtype, device=device) for name, part in codec.parts.items()}


def select_entries(stored: Parts, elements: range) -> dict[str, Tensor]:
    """The entries of a stored state, or of a master weight, for a run of elements that starts at a multiple of 128, as views.

    A scale () of the whole tensor is selected as it is.
    """
    selected = {}
    for name, entries in stored.items():
        part = Part(entries.dtype, 1 if name == "codes" else BLOCK)
        selected[name] = entries if entries.dim() == 0 else part.select(entries, elements)
    return selected


def _blocks(values: Tensor) -> Tensor:
    """1-D values as rows of 128, the last one filled with zeros."""
    missing = -values.numel() % BLOCK
    return (F.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)
