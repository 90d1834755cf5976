"""Find the prediction of what a benchmark measures on a GPU, and say whether the measurement contradicts it.

`benchmarks/PREDICTIONS.md` has a row for each predicted figure, written by `make bench-predicted-speed` and
`bench-predicted-memory` under the measurement's own name: "speed, predicted for an H100: GPT 1.3 B, O2: speed / bf16-amp".
"""

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import PREDICTIONS, Figure, read

TOLERANCE = 0.05
"""The part of a prediction by which a measurement may lie beyond its ends: for the spread between runs and cards, what an
allocator rounds up, and the 2 % of a GPT's peak that torch.compile saves (docs/benchmarks.md)."""

DEVICES = {"H100": "H100, 80 GB", "H200": "H200, 139 GiB"}
"""Devices that figures are predicted for, as a part of torch's name for them, and their memory in the largest GPT's rows."""

SAME_FIGURE = {
    ", fused loss, activations in FP8, gradient release: peak memory / ": ", the first three / ",
    "largest GPT of hidden size 4096 that trains, O2 / bf16-amp at most": (
        "{card}: O2, without options / bf16-amp, without options"
    ),
    ", CUDA graphs: speed / bf16-amp, CUDA graphs": ": speed / bf16-amp",
}
"""Parts of names that a benchmark and the prediction of the same word otherwise. A replayed step gains what a step gains."""


@dataclass(frozen=True)
class Prediction:
    """A figure's predicted value with its ends, in the unit of the measurement."""

    text: str
    least: float
    most: float

    def __str__(self) -> str:
        return self.text

    def verdict(self, measured: str) -> str:
        """Return "holds", or by how much a measurement lies beyond an end; "" for what has no number."""
        value = number(measured)
        if value is None:
            return ""
        if value < self.least * (1 - TOLERANCE):
            return f"contradicts: {value / self.least - 1:+.0%}"
        if value > self.most * (1 + TOLERANCE):
            return f"contradicts: {value / self.most - 1:+.0%}"
        return "holds"


@dataclass(frozen=True)
class Predictions:
    """The predicted figures by name. device: one of DEVICES, or None where only those hold that every device shares."""

    figures: dict[str, Figure]
    device: str | None

    @classmethod
    def of(cls, machine: str, path: Path = PREDICTIONS) -> "Predictions":
        """Read the predictions for a device with this name."""
        _, rows, _ = read(path)
        return cls(rows, next((device for device in DEVICES if device in machine), None))

    def find(self, figure: str) -> Prediction | None:
        """Return the prediction of a row of RESULTS.md that a GPU benchmark makes. figure: its name with the area before it."""
        name = figure.partition(": ")[2]
        for measured, predicted in SAME_FIGURE.items():
            card = DEVICES[self.device] if self.device else ""
            name = name.replace(measured, predicted.format(card=card))
        areas = [f"speed, predicted for an {self.device}"] if self.device else []
        found = (self.figures.get(f"{area}: {name}") for area in (*areas, "memory, predicted"))
        row = next((row for row in found if row is not None), None)
        return None if row is None else _prediction(row)


def number(text: str) -> float | None:
    """Return the number that a figure's value begins with; None for words."""
    found = re.match(r"[+-]?[\d,]*\.?\d+", text)
    return float(found[0].replace(",", "")) if found else None


def _prediction(row: Figure) -> Prediction | None:
    value = number(row.value)
    if value is None:
        return None
    ends = [number(text) for text in row.interval.split(" to ")] if row.interval else [value]
    bounds = sorted([value, *(end for end in ends if end is not None)])
    return Prediction(row.value + (f", {row.interval}" if row.interval else ""), bounds[0], bounds[-1])
