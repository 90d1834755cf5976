"""Find the linear layers that gain nothing in FP8, by a table of speeds: measured on a device, or computed until then.

`speedups.json` next to this file holds a table for each known device. The one for compute capability 9.0 is computed by
`benchmarks/gpu/roofline.py`, by the rates at which the kernels run; it names other assumptions, and has both ends of what these
give. `make bench-gpu-kernels` measures a device and writes a file with its table. A device that has no table takes the nearest,
which the reason of each decision names.
A speedup is the time of a layer's forward and backward pass in bf16 over that in FP8, quantization included, by the
device's own clock: what the host needs to enqueue them is not in it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import floor, log2
from pathlib import Path
from typing import Any, NamedTuple

from octet.api_schemas.levels import Level
from octet.api_schemas.recipe import RecipeSpec

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
"""The ways in which layers hold weights: fp32 values, which bf16-amp casts to bf16; or codes, which are decoded."""

Grid = Sequence[Any]
"""Numbers, nested by tokens, in features and out features."""


class Chip(NamedTuple):
    """A CUDA device: its name, and its compute capability (major, minor)."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class SpeedupTable:
    """The speedups on one device, or computed for the devices of one compute capability.

    source: measured, or computed. device, versions, date: where, with what and when; empty where it was computed.
    tokens, features: ascending, the sizes of the grid. speedups: by weights, then kind. assumptions: by name, in words, of a
    computed table; its speedups are those of "own". slowest_to_fastest: by weights, then kind, the grids of both ends of them.
    """

    capability: Sequence[int]
    source: str
    device: str
    versions: str
    date: str
    tokens: Sequence[int]
    features: Sequence[int]
    speedups: Mapping[str, Mapping[str, Grid]]
    assumptions: Mapping[str, str] = field(default_factory=dict)
    slowest_to_fastest: Mapping[str, Mapping[str, Sequence[Grid]]] = field(default_factory=dict)

    def speedup(self, tokens: int, in_features: int, out_features: int, weights: str, kind: str) -> float:
        """Between sizes of the grid in proportion to their logarithms; beyond its edges that of the edge."""
        return self._at(self.speedups[weights][kind], tokens, in_features, out_features)

    def ends(self, tokens: int, in_features: int, out_features: int, weights: str, kind: str) -> list[float]:
        """The speedups by the slowest and the fastest assumptions; empty where all agree, and where it was measured."""
        grids = self.slowest_to_fastest.get(weights, {}).get(kind, ())
        return [self._at(grid, tokens, in_features, out_features) for grid in grids]

    def _at(self, grid: Grid, tokens: int, in_features: int, out_features: int) -> float:
        sizes = ((tokens, self.tokens), (in_features, self.features), (out_features, self.features))
        return _interpolate(grid, [_position(size, known) for size, known in sizes])

    @property
    def origin(self) -> str:
        """In words."""
        if self.source == "measured":
            return f"measured on {self.device}, {self.date}"
        return f"computed for compute capability {_dotted(self.capability)}, not measured"

    def origin_for(self, chip: Chip) -> str:
        """The origin in words, with a note for a chip that has no table of its own."""
        return self.origin if self.is_of(chip) else f"{self.origin}; {chip.name} ({_dotted(chip.capability)}) has no table"

    def is_of(self, chip: Chip) -> bool:
        """Return whether it was measured on such a chip, or computed for its compute capability."""
        return chip.name == self.device or (not self.device and chip.capability == tuple(self.capability))


@cache
def load_tables(path: Path = TABLES) -> Sequence[SpeedupTable]:
    """The tables of a file."""
    return [SpeedupTable(**document) for document in json.loads(path.read_text())]


def table_for(chip: Chip, tables: Sequence[SpeedupTable]) -> SpeedupTable:
    """The table of a chip: its own, else one of its compute capability, else of the nearest, the older of two."""

    def distance(table: SpeedupTable) -> tuple[bool, int, int]:
        major, minor = table.capability
        away = 10 * (major - chip.capability[0]) + minor - chip.capability[1]
        return (table.device != chip.name, abs(away), away)

    return min(tables, key=distance)


def kind_of(recipe: RecipeSpec) -> str:
    """The entry of KINDS for a recipe, or "mx". Products left in bf16, and delayed scaling, which reads less, change little."""
    return "block, hybrid" if (recipe.granularity, recipe.format) == ("block", "HYBRID") else recipe.granularity


def why_bf16(
    in_features: int, out_features: int, tokens: int, level: Level, recipe: RecipeSpec, chip: Chip | None
) -> str | None:
    """Return why a layer multiplies in bf16, with the numbers; None where FP8 is no slower, or the table lacks the recipe.

    chip: None for any device but CUDA's, where FP8 is not for speed. Of mx nothing is known until a Blackwell is measured.
    """
    if chip is None:
        return None
    table, weights = table_for(chip, load_tables()), "fp32" if level.weight == "fp32" else "scaled"
    if kind_of(recipe) not in table.speedups[weights]:
        return None
    shape = (tokens, in_features, out_features, weights, kind_of(recipe))
    speedup, ends = table.speedup(*shape), table.ends(*shape)
    if speedup >= 1:
        return None
    found = f"{in_features} -> {out_features} features at {tokens:,} tokens: {_floored(speedup)} of bf16's speed in FP8"
    others = f", {' to '.join(map(_floored, ends))} by other assumptions" if ends else ""
    return f"{found}{others} ({table.origin_for(chip)})"


def borrowed_table(recipe: RecipeSpec, chip: Chip | None) -> str | None:
    """Return the origin of the table that a chip without one takes; None where it has one, or none decides."""
    if chip is None:
        return None
    table = table_for(chip, load_tables())
    return None if table.is_of(chip) or kind_of(recipe) not in table.speedups["fp32"] else table.origin_for(chip)


def _dotted(capability: Sequence[int]) -> str:
    return ".".join(map(str, capability))


def _floored(speedup: float) -> str:
    return f"{floor(100 * speedup) / 100:.2f}"


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
