"""The kind of a scale, codes together with their scale, and the formats of a linear layer's operands.

How an operand is scaled is decided once, where a recipe is resolved, and passed along as a `ScaleKind`. Only the public
`encode` and `dequantize`, which are given two tensors without a kind, find it from shapes (`kind_of_scale`).
"""

from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from octet.worker.kernels.formats import BLOCK, MX_BLOCK

GRANULARITIES = ("tensor", "row", "block", "mx")
BLOCKS = ((1, BLOCK), (BLOCK, BLOCK))


class ScaleKind(Enum):
    """Which elements of a tensor share a scale. The value is the kind's name, as ops and kernels are given it."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK_1X128 = "block 1x128"
    BLOCK_128X128 = "block 128x128"
    BLOCK_1X32 = "block 1x32"  # of "mx"

    @property
    def granularity(self) -> str:
        """One of GRANULARITIES."""
        return "mx" if self is ScaleKind.BLOCK_1X32 else self.value.partition(" ")[0]

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block: (128, 128), (1, 32), else (1, 128), which counts for blocks only."""
        if self is ScaleKind.BLOCK_1X32:
            return (1, MX_BLOCK)
        return (BLOCK, BLOCK) if self is ScaleKind.BLOCK_128X128 else (1, BLOCK)

    @property
    def is_blockwise(self) -> bool:
        """True if the scale changes along the dimension that a product sums over."""
        return self in (ScaleKind.BLOCK_1X32, ScaleKind.BLOCK_1X128, ScaleKind.BLOCK_128X128)

    @property
    def is_per_row(self) -> bool:
        """True if each row has scales of its own."""
        return self in (ScaleKind.ROW, ScaleKind.BLOCK_1X32, ScaleKind.BLOCK_1X128)

    @property
    def is_transposable(self) -> bool:
        """True if the scale of a matrix, transposed, is the scale of the transposed matrix."""
        return not self.is_per_row


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
        """Every step-th row of a matrix, from the first on; of 128×128 blocks, with the scales of 1×128."""
        codes = self.codes[::step]
        if self.kind is ScaleKind.TENSOR:
            return ScaledCodes(codes, self.dequant_scale, self.kind)
        if self.kind is ScaleKind.BLOCK_128X128:
            block = torch.arange(0, len(self.codes), step, device=codes.device) // BLOCK
            return ScaledCodes(codes, self.dequant_scale[block], ScaleKind.BLOCK_1X128)
        return ScaledCodes(codes, self.dequant_scale[::step], self.kind)


class Operand(NamedTuple):
    """A matrix on its way into a product: values, or codes with their dequant_scale.

    amax: fp32 (), of the values, where it is known; of use where the operand has one scale.
    """

    data: Tensor
    dequant_scale: Tensor | None = None
    amax: Tensor | None = None


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
    weight is stored as (K, N). text: these formats as the string that an op takes.
    """

    input: OperandFormat = OperandFormat()
    weight: OperandFormat = OperandFormat()
    grad_output: OperandFormat = OperandFormat(torch.float8_e5m2)
    margin: int = 0
    activation: str | None = None
    is_transposed: bool = False
    text: str = field(init=False)

    def __post_init__(self) -> None:
        """Write the text once: a graph of torch.compile holds it as a constant."""
        operands = (self.input, self.weight, self.grad_output)
        words = [f"{operand} {operand.kind.value}" for operand in operands]
        words += [f"margin {self.margin}", f"after {self.activation}" if self.activation else "as it is"]
        object.__setattr__(self, "text", "; ".join([*words, "stored KN" if self.is_transposed else "stored NK"]))

    @staticmethod
    @cache
    def parse(text: str) -> "LinearFormats":
        """Read what `text` says."""
        *operands, margin, activation, stored = text.split("; ")
        named = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
        input, weight, grad_output = (
            OperandFormat(named[name], ScaleKind(kind)) for name, _, kind in (each.partition(" ") for each in operands)
        )
        after = activation.removeprefix("after ") if activation.startswith("after ") else None
        amount = int(margin.removeprefix("margin "))
        return LinearFormats(input, weight, grad_output, amount, after, stored == "stored KN")


def scale_kind(granularity: str, block: tuple[int, int] = (1, BLOCK)) -> ScaleKind:
    """The kind for a granularity and, of blocks, their size. ValueError, naming what is allowed, for anything else."""
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity is {granularity!r}; allowed: {', '.join(GRANULARITIES)}.")
    if granularity == "mx":
        return ScaleKind.BLOCK_1X32
    if block not in BLOCKS:
        raise ValueError(f"block is {block}; allowed: (1, 128) for activations and gradients, (128, 128) for weights.")
    if granularity == "block":
        return ScaleKind.BLOCK_128X128 if block == (BLOCK, BLOCK) else ScaleKind.BLOCK_1X128
    return ScaleKind.TENSOR if granularity == "tensor" else ScaleKind.ROW


def scale_shape(shape: torch.Size, kind: ScaleKind) -> tuple[int, ...]:
    """The shape of the dequant_scale of a tensor of that shape: (), (..., 1), or one element per block."""
    if kind is ScaleKind.TENSOR:
        return ()
    if kind is ScaleKind.ROW:
        return (*shape[:-1], 1)
    num_blocks = -(-shape[-1] // kind.block[1])
    return (-(-shape[:-1].numel() // BLOCK), num_blocks) if kind is ScaleKind.BLOCK_128X128 else (*shape[:-1], num_blocks)


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
