"""Find the linear layers that gain nothing in FP8, by a table of speeds: measured on a device, or computed until then.

`speedups.json` next to this file holds a table for each known compute capability. The one for 9.0 is computed by
`benchmarks/gpu/roofline.py`; `make bench-gpu-kernels` measures it and writes a file to put in its place.
A speedup is the time of a layer's forward and backward pass in bf16 over that in FP8, quantization included, by the
device's own clock: what the host needs to enqueue them is not in it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import floor, log2
from pathlib import Path
from typing import Any

from api_schemas.levels import Level
from api_schemas.recipe import RecipeSpec

TABLES = Path(__file__).with_name("speedups.json")
DEFAULT_TOKENS = 8192
KINDS = {
    "tensor": RecipeSpec(),
    "row": RecipeSpec(granularity="row"),
    "block": RecipeSpec(granularity="block"),
    "block, hybrid": RecipeSpec(granularity="block", format="HYBRID"),
}
"""Recipes of different speed. By blocks, cuBLASLt multiplies E4M3 alone; Triton multiplies E5M2."""

WEIGHTS = ("fp32", "scaled")
"""How a layer holds its weight: as fp32 values, which bf16-amp casts to bf16; or as codes with a scale, which are decoded."""

Grid = Sequence[Any]
"""Numbers, nested by tokens, in features and out features."""


@dataclass(frozen=True)
class SpeedupTable:
    """The speedups on devices of one compute capability.

    source: measured, or computed. device, versions, date: where, with what and when; empty where it was computed.
    tokens, features: ascending, the sizes of the grid. speedups: by weights, then kind.
    """

    capability: Sequence[int]
    source: str
    device: str
    versions: str
    date: str
    tokens: Sequence[int]
    features: Sequence[int]
    speedups: Mapping[str, Mapping[str, Grid]]

    def speedup(self, tokens: int, in_features: int, out_features: int, weights: str, kind: str) -> float:
        """Between sizes of the grid in proportion to their logarithms; beyond its edges that of the edge."""
        sizes = ((tokens, self.tokens), (in_features, self.features), (out_features, self.features))
        return _interpolate(self.speedups[weights][kind], [_position(size, known) for size, known in sizes])

    @property
    def origin(self) -> str:
        """In words."""
        if self.source == "measured":
            return f"measured on {self.device}, {self.date}"
        return f"computed for compute capability {'.'.join(map(str, self.capability))}, not measured"


@cache
def load_tables(path: Path = TABLES) -> dict[tuple[int, int], SpeedupTable]:
    """The tables of a file, by compute capability."""
    tables = [SpeedupTable(**document) for document in json.loads(path.read_text())]
    return {(table.capability[0], table.capability[1]): table for table in tables}


def kind_of(recipe: RecipeSpec) -> str:
    """The entry of KINDS for a recipe. Products left in bf16, and delayed scaling, which reads less, change little."""
    return "block, hybrid" if (recipe.granularity, recipe.format) == ("block", "HYBRID") else recipe.granularity


def why_bf16(
    in_features: int, out_features: int, tokens: int, level: Level, recipe: RecipeSpec, capability: tuple[int, int] | None
) -> str | None:
    """Why a layer multiplies in bf16, with the numbers; None where FP8 is no slower, or nothing is known of the device.

    capability: of a CUDA device; None for any other, where FP8 is not for speed.
    """
    table = load_tables().get(capability) if capability is not None else None
    if table is None:
        return None
    speedup = table.speedup(tokens, in_features, out_features, "fp32" if level.weight == "fp32" else "scaled", kind_of(recipe))
    if speedup >= 1:
        return None
    shape = f"{in_features} -> {out_features} features at {tokens:,} tokens"
    return f"{shape}: {floor(100 * speedup) / 100:.2f} of bf16's speed in FP8 ({table.origin})"


def _position(size: int, sizes: Sequence[int]) -> tuple[int, float]:
    """The index of the size below, and how far the next one is away, 0 to 1, in powers of two."""
    size = min(max(size, sizes[0]), sizes[-1])
    index = max(index for index, known in enumerate(sizes) if known <= size)
    if size == sizes[index]:
        return index, 0.0
    return index, log2(size / sizes[index]) / log2(sizes[index + 1] / sizes[index])


def _interpolate(values: Grid, positions: Sequence[tuple[int, float]]) -> float:
    (index, fraction), *others = positions
    ends = values[index : index + 2] if fraction else values[index : index + 1]
    low, high = (end if not others else _interpolate(end, others) for end in (ends[0], ends[-1]))
    return low + fraction * (high - low)
