"""How an optimizer state is stored: named codecs between fp32 values and tensors of codes and scales.

A codec sees a run of consecutive elements of the flattened parameter that starts at a multiple of 128. Everything is IEEE
arithmetic that any device repeats bit for bit; no logarithm or power is taken at run time.

    value = codes                                              fp32, bf16-sr
    value = codes × dequant_scale                              fp16-tensor, fp16-block, fp8-tensor, fp8-block
    value = sign · (|codes| / 448)^(1/power) × dequant_scale   fp8-dre: dynamic range expansion (COAT, arXiv 2410.19313)
    value = sign · (codes / 127)⁴ × dequant_scale              int8-companded
    value = (codes / 255)⁴ × dequant_scale                     uint8-companded, for second moments: values without sign
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from worker import kernels
from worker.kernels.formats import BF16, BLOCK, E4M3

Parts = Mapping[str, Tensor]
Draw = Callable[[range], Tensor]
"""Random int32 words for a run of elements."""

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Part:
    """One tensor of a stored state; `num_elements` of the parameter share an entry, all of them where it is 0."""

    dtype: torch.dtype
    num_elements: int = 1

    def shape(self, num_elements: int) -> tuple[int, ...]:
        """The shape of the tensor for a parameter of that many elements."""
        return (-(-num_elements // self.num_elements),) if self.num_elements else ()

    def select(self, stored: Tensor, elements: range) -> Tensor:
        """The entries for a run of elements, as a view."""
        if self.num_elements == 0:
            return stored
        return stored[elements.start // self.num_elements : -(-elements.stop // self.num_elements)]


class Codec(ABC):
    """A way to store fp32 values: which tensors, and how they are filled and read."""

    draws = False  # whether encode rounds stochastically and needs random words

    def __init__(self, **parts: Part) -> None:
        self.parts = parts

    @abstractmethod
    def decode(self, stored: Parts) -> Tensor:
        """The fp32 values, 1-D; may be the stored tensor itself."""

    @abstractmethod
    def encode(self, values: Tensor, random_words: Tensor | None) -> Parts:
        """The parts for fp32 values, 1-D. random_words: int32, one per element, if the codec draws."""

    @property
    def per_tensor(self) -> bool:
        """Whether all elements share an entry, so that they must be encoded together."""
        return any(part.num_elements == 0 for part in self.parts.values())

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of a stored state, scales included."""
        return sum(torch.Size(part.shape(num_elements)).numel() * part.dtype.itemsize for part in self.parts.values())


class Fp32(Codec):
    def decode(self, stored: Parts) -> Tensor:
        return stored["codes"]

    def encode(self, values: Tensor, random_words: Tensor | None) -> Parts:
        return {"codes": values}


class Bf16(Codec):
    """Stochastically rounded: to nearest, a second moment at beta2 = 0.999 stalls (docs/log.md)."""

    draws = True

    def decode(self, stored: Parts) -> Tensor:
        return stored["codes"].float()

    def encode(self, values: Tensor, random_words: Tensor | None) -> Parts:
        assert random_words is not None
        return {"codes": kernels.stochastic_round(values, BF16, random_words)}


class Scaled(Codec):
    """Codes at a power-of-two scale, for the whole tensor or for each block of 128."""

    def decode(self, stored: Parts) -> Tensor:
        return kernels.dequantize(stored["codes"], stored["dequant_scale"])

    def encode(self, values: Tensor, random_words: Tensor | None) -> Parts:
        granularity = "tensor" if self.per_tensor else "block"
        codes, dequant_scale = kernels.quantize(values, self.parts["codes"].dtype, granularity)
        return {"codes": codes, "dequant_scale": dequant_scale}


class DynamicRangeExpansion(Codec):
    """E4M3 codes of (|x| / amax)^power: a block that spans few binades gives its spare range away for precision.

    power = 1 + eighths / 8. The smallest element of a block, d binades below amax, lands at most 18 binades below E4M3's
    largest number, on its last code: no element is lost to the gain of the others, and the error of the others' codes is
    1/power of E4M3's. Chosen over other rules by measurement (docs/log.md).
    """

    EXPANDED_BINADES = 18
    NUM_POWERS = 16

    def decode(self, stored: Parts) -> Tensor:
        codes = _blocks(stored["codes"].view(torch.uint8)).to(torch.int32)
        index = codes.add_(stored["eighths"].to(torch.int32).unsqueeze(1), alpha=256)
        values = expansion_table(codes.device).index_select(0, index.view(-1)).view_as(index)
        return values.mul_(stored["dequant_scale"].unsqueeze(1)).view(-1)[: stored["codes"].numel()]

    def encode(self, values: Tensor, random_words: Tensor | None) -> Parts:
        blocks = _blocks(values)
        magnitude = blocks.abs()
        amax = magnitude.amax(1, keepdim=True)
        eighths = self._eighths(magnitude, amax)
        ratio = magnitude.div_(amax.clamp(min=TINY))
        root, expanded = ratio, ratio.clone()
        for bit in (8, 4, 2, 1):  # times x, x^(1/2), x^(1/4), x^(1/8), each where the power has it
            has_root = ((eighths & bit) > 0).float()
            expanded.mul_((root * has_root).add_(1 - has_root))
            root = kernels.sqrt(root)
        codes = expanded.mul_(E4M3.max).copysign_(blocks).to(E4M3.dtype)
        return {
            "codes": codes.view(-1)[: values.numel()],
            "dequant_scale": amax.view(-1),
            "eighths": eighths.to(torch.uint8).view(-1),
        }

    def _eighths(self, magnitude: Tensor, amax: Tensor) -> Tensor:
        """In integers, so exact: a number's bits are its logarithm, to a tenth of a binade. Zeros do not count."""
        logarithm = magnitude.view(torch.int32)
        below_amax = (amax.view(torch.int32) - logarithm).mul_((logarithm >> 23).clamp_(max=1)).amax(1, keepdim=True)
        eighths_of_binades = (below_amax >> 20) + 1
        return (64 * self.EXPANDED_BINADES // eighths_of_binades - 8).clamp_(0, self.NUM_POWERS - 1)


@cache
def expansion_table(device: torch.device) -> Tensor:
    """The value of each E4M3 code under each power, for amax 1: 16 × 256 entries, rounded from double precision on the host."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3.dtype)
    decoded = kernels.dequantize(codes, torch.ones(())).tolist()
    values = [
        math.copysign(abs(value / E4M3.max) ** (8 / (8 + eighths)), value)
        for eighths in range(DynamicRangeExpansion.NUM_POWERS)
        for value in decoded
    ]
    return torch.tensor(values, dtype=torch.float64).float().to(device)


class Companded(Codec):
    """Integers spaced by their fourth power: 1.6 % of the value near amax at 127 levels, and nothing but zero becomes zero."""

    def __init__(self, num_levels: int, draws: bool, **parts: Part) -> None:
        super().__init__(**parts)
        self.num_levels, self.draws = num_levels, draws

    def decode(self, stored: Parts) -> Tensor:
        root = _blocks(stored["codes"].float()).div_(self.num_levels)
        values = root.square().square_().mul_(stored["dequant_scale"].unsqueeze(1))
        return values.copysign_(root).view(-1)[: stored["codes"].numel()]

    def encode(self, values: Tensor, random_words: Tensor | None) -> Parts:
        blocks = _blocks(values)
        magnitude = blocks.abs()
        amax = magnitude.amax(1, keepdim=True)
        root = kernels.sqrt(kernels.sqrt(magnitude.div_(amax.clamp(min=TINY)))).copysign_(blocks).view(-1)[: values.numel()]
        if random_words is None:
            levels = root.mul_(self.num_levels).round_()
        else:
            position = (random_words & 0xFFFF).float().mul_(2.0**-16)
            levels = root.mul_(self.num_levels).add_(position).floor_().clamp_(max=self.num_levels)
        return {"codes": levels.to(self.parts["codes"].dtype), "dequant_scale": amax.view(-1)}


_PER_BLOCK, _PER_TENSOR = Part(torch.float32, BLOCK), Part(torch.float32, 0)
CODECS: Mapping[str, Codec] = {
    "fp32": Fp32(codes=Part(torch.float32)),
    "bf16-sr": Bf16(codes=Part(torch.bfloat16)),
    "fp16-tensor": Scaled(codes=Part(torch.float16), dequant_scale=_PER_TENSOR),
    "fp16-block": Scaled(codes=Part(torch.float16), dequant_scale=_PER_BLOCK),
    "fp8-tensor": Scaled(codes=Part(E4M3.dtype), dequant_scale=_PER_TENSOR),
    "fp8-block": Scaled(codes=Part(E4M3.dtype), dequant_scale=_PER_BLOCK),
    "fp8-dre": DynamicRangeExpansion(codes=Part(E4M3.dtype), dequant_scale=_PER_BLOCK, eighths=Part(torch.uint8, BLOCK)),
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


def _blocks(values: Tensor) -> Tensor:
    """1-D values as rows of 128, the last one filled with zeros."""
    missing = -values.numel() % BLOCK
    return (F.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)
