"""The kind of a scale, codes together with their scale, and the formats of a linear layer's operands.

How an operand is scaled is decided once, where a recipe is resolved, and passed along as a `ScaleKind`. Only the public
`encode` and `dequantize`, which are given two tensors without a kind, find it from shapes (`kind_of_scale`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from octet.worker.kernels.formats import BLOCK


class ScaleKind(Enum):
    """Which elements of a tensor share a scale. The value is the kind's name, as ops are given it.

    A block is one row or a square, and its sizes, which the name gives, are powers of two: two
    kinds of blocks then never have scales of one shape, unless each has one scale for the same
    elements. What else a kind is follows from its name; no kernel lists the kinds of blocks.

    block: rows and columns of a block; (1, 128), which counts for blocks only, for the others.
    is_blockwise: the scale changes along the dimension that a product sums over.
    is_per_row: each row has scales of its own.
    is_transposable: the scale of a matrix, transposed, is the scale of the transposed matrix.
    """

    TENSOR = "tensor"
    ROW = "row"
    BLOCK_1X128 = "block 1x128"
    BLOCK_128X128 = "block 128x128"
    BLOCK_1X32 = "block 1x32"

    def __init__(self, name: str) -> None:
        """Read the size of a block from the kind's name."""
        size = name.removeprefix("block ")
        self.is_blockwise = size != name
        rows, columns = map(int, size.split("x")) if self.is_blockwise else (1, BLOCK)
        self.block = (rows, columns)
        self.is_transposable = name == "tensor" or rows > 1
        self.is_per_row = not self.is_transposable

    @property
    def granularity(self) -> str:
        """One of GRANULARITIES."""
        return next(granularity for granularity, kinds in GRANULARITIES.items() if self in kinds)


GRANULARITIES: Mapping[str, tuple[ScaleKind, ScaleKind]] = {
    "tensor": (ScaleKind.TENSOR, ScaleKind.TENSOR),
    "row": (ScaleKind.ROW, ScaleKind.ROW),
    "block": (ScaleKind.BLOCK_1X128, ScaleKind.BLOCK_128X128),
    "mx": (ScaleKind.BLOCK_1X32, ScaleKind.BLOCK_1X32),
}
"""The granularities of recipes: the kind of scale of activations and gradients, and that of weights."""


class ScaledCodes(NamedTuple):
    """Codes with their scale: value = codes × dequant_scale.

    codes: float8_e4m3fn, float8_e5m2 or float16. dequant_scale: fp32 of `scale_shape`. An operand of a product is a matrix
    whose last dimension is summed.
    """

    codes: Tensor
    dequant_scale: Tensor
    kind: ScaleKind

    def t(self) -> "ScaledCodes":
        """The transposed matrix, as views; the kind must be transposable."""
        assert self.kind.is_transposable
        return ScaledCodes(self.codes.t(), self.dequant_scale.t(), self.kind)

    def times(self, unit: Tensor) -> "ScaledCodes":
        """The values times a power of two."""
        return ScaledCodes(self.codes, self.dequant_scale * unit, self.kind)

    def every(self, step: int) -> "ScaledCodes":
        """Every step-th row of a matrix, from the first on; of N×N blocks, with the scales of 1×N."""
        codes = self.codes[::step]
        if self.kind is ScaleKind.TENSOR:
            return ScaledCodes(codes, self.dequant_scale, self.kind)
        block_rows, block_columns = self.kind.block
        if block_rows > 1:
            block = torch.arange(0, len(self.codes), step, device=codes.device) // block_rows
            return ScaledCodes(codes, self.dequant_scale[block], ScaleKind(f"block 1x{block_columns}"))
        return ScaledCodes(codes, self.dequant_scale[::step], self.kind)


class Operand(NamedTuple):
    """A matrix on its way into a product: values, or codes with their dequant_scale.

    amax: fp32 (), of the values, where it is known; of use where the operand has one scale.
    """

    data: Tensor
    dequant_scale: Tensor | None = None
    amax: Tensor | None = None


class Operands(NamedTuple):
    """The weights of E layers of one shape: values, or codes with their dequant_scales, fp32 () each.

    amaxes: fp32 (), of the values. Lists are empty where there is none.
    """

    data: list[Tensor]
    dequant_scales: list[Tensor]
    amaxes: list[Tensor]


@dataclass(frozen=True)
class OperandFormat:
    """The codes of one operand, and which of its elements share a scale."""

    dtype: torch.dtype = torch.float8_e4m3fn
    kind: ScaleKind = ScaleKind.TENSOR

    def __str__(self) -> str:
        return "e5m2" if self.dtype == torch.float8_e5m2 else "e4m3"


@dataclass(frozen=True)
class LinearFormats:
    """The formats in which the operands of a linear layer's three products become codes.

    activation: one of ACTIVATIONS, applied to the input before it is quantized. is_transposed: the
    weight is stored as (K, N). fast_grad_input: the input's gradient is summed by Hopper's shorter
    accumulator, as outputs are. text: these formats as the string that an op takes.
    """

    input: OperandFormat = OperandFormat()
    weight: OperandFormat = OperandFormat()
    grad_output: OperandFormat = OperandFormat(torch.float8_e5m2)
    margin: int = 0
    activation: str | None = None
    is_transposed: bool = False
    fast_grad_input: bool = False
    text: str = field(init=False)

    def __post_init__(self) -> None:
        """Write the text once: a graph of torch.compile holds it as a constant."""
        operands = (self.input, self.weight, self.grad_output)
        words = [f"{operand} {operand.kind.value}" for operand in operands]
        words += [f"margin {self.margin}", f"after {self.activation}" if self.activation else "as it is"]
        words += ["stored KN" if self.is_transposed else "stored NK", "fast" if self.fast_grad_input else "precise"]
        object.__setattr__(self, "text", "; ".join(words))

    @staticmethod
    @cache
    def parse(text: str) -> "LinearFormats":
        """Read what `text` says."""
        *operands, margin, activation, stored, grad_input = text.split("; ")
        named = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
        input, weight, grad_output = (
            OperandFormat(named[name], ScaleKind(kind)) for name, _, kind in (each.partition(" ") for each in operands)
        )
        after = activation.removeprefix("after ") if activation.startswith("after ") else None
        amount = int(margin.removeprefix("margin "))
        return LinearFormats(input, weight, grad_output, amount, after, stored == "stored KN", grad_input == "fast")


def scale_kind(granularity: str, block: tuple[int, int] | None = None) -> ScaleKind:
    """The kind for a granularity and a size of its blocks, by default activations'. ValueError for anything else."""
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity is {granularity!r}; allowed: {', '.join(GRANULARITIES)}.")
    activations, weights = GRANULARITIES[granularity]
    if block is None or block == activations.block:
        return activations
    if block != weights.block:
        allowed = f"{activations.block} for activations and gradients, {weights.block} for weights"
        raise ValueError(f"block is {block}; allowed: {allowed}, with granularity {granularity}.")
    return weights


def scale_shape(shape: torch.Size, kind: ScaleKind) -> tuple[int, ...]:
    """The shape of the dequant_scale of a tensor of that shape: (), (..., 1), or one element per block."""
    if kind is ScaleKind.TENSOR:
        return ()
    if kind is ScaleKind.ROW:
        return (*shape[:-1], 1)
    block_rows, block_columns = kind.block
    num_blocks = -(-shape[-1] // block_columns)
    return (*shape[:-1], num_blocks) if block_rows == 1 else (-(-shape[:-1].numel() // block_rows), num_blocks)


def check_scale(dequant_scale: Tensor, shape: torch.Size, kind: ScaleKind, name: str = "dequant_scale") -> None:
    """ValueError where a scale of that kind would have another shape for codes of the given one."""
    if kind is ScaleKind.TENSOR and not dequant_scale.ndim:
        return
    allowed = scale_shape(shape, kind)
    if dequant_scale.shape != allowed:
        got = f"{name} is {tuple(dequant_scale.shape)} for codes {tuple(shape)}"
        raise ValueError(f"{got}; allowed: {kind.value} {allowed}. Pass the scale that quantize returned.")


def kind_of_scale(dequant_scale: Tensor, shape: torch.Size) -> ScaleKind:
    """The kind of a scale that came without it, by its shape, for codes of a shape; where two kinds fit they mean the same."""
    if dequant_scale.ndim == 0:
        return ScaleKind.TENSOR
    expected = [(kind, scale_shape(shape, kind)) for kind in ScaleKind if kind is not ScaleKind.TENSOR]
    for kind, scales in expected:
        if tuple(dequant_scale.shape) == scales:
            return kind
    allowed = "; ".join(f"{kind.value} {scales}" for kind, scales in expected)
    got = f"dequant_scale is {tuple(dequant_scale.shape)} for codes {tuple(shape)}"
    raise ValueError(f"{got}; allowed: tensor (); {allowed}. Pass the scale that quantize returned.")


def empty_operand_scale(shape: torch.Size, kind: ScaleKind, device: torch.device) -> Tensor:
    """The dequant_scale, not yet filled, of an operand (rows, summed), laid out as cuBLAS reads it.

    It is contiguous, except that neighbouring rows of a block 1×128 scale are adjacent.
    """
    scales = scale_shape(shape, kind)
    if kind is ScaleKind.BLOCK_1X128:
        return torch.empty(scales[::-1], dtype=torch.float32, device=device).t()
    return torch.empty(scales, dtype=torch.float32, device=device)
