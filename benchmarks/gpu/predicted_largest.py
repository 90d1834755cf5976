"""Predict the largest GPT whose training step fits a card, by level, without options that save memory.

The shapes are those of `largest.py`: hidden size 4096, one sequence of 2,048 tokens. The bytes that are alive at a moment of a
step grow by as much with every layer, and the peak is the largest over all moments: a convex function of the number of layers,
which between two points lies below their line. Steps of 2 and 4 layers say how many fit the largest card, and a step of one
layer more is run. Bisection on the lines through the three points then gives numbers of layers that fit.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import largest
from benchmarks.gpu.networks import BF16_AMP, Step, Way, build_gpt, gpt_step
from benchmarks.gpu.report import Row, Target

GIB = 1 << 30
CARDS = {"H200, 139 GiB": 139 * GIB, "H100, 80 GB": 80 * 10**9}
SMOKE_CARDS = {"tiny, 8 MiB": 8 << 20, "tiny, 4 MiB": 4 << 20}
SMALL_LAYERS = (2, 4)
MOST_LAYERS = 4096
TARGET = Target(2.0, 2.6)
LEVELS = ("O2", "O2-8bit", "O3-split-8bit", "O1")

PeakOf = Callable[[Callable[[torch.device], tuple[Step, Any]]], int]


@dataclass(frozen=True)
class Peaks:
    """The peaks of steps in bytes, by number of layers: of two or more numbers, which rise."""

    points: tuple[tuple[int, int], ...]

    def at(self, num_layers: int) -> float:
        """Return the peak of a number of layers, on the lines through the points."""
        segments = list(itertools.pairwise(self.points))
        (few, low), (many, high) = next((pair for pair in segments if num_layers <= pair[1][0]), segments[-1])
        return low + (num_layers - few) * (high - low) / (many - few)

    def most_layers(self, capacity: int) -> int:
        """Return the largest number of layers that peak within a capacity, by bisection; 0 if a single one does not."""
        fits, fails = 0, MOST_LAYERS
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if self.at(middle) <= capacity else (fits, middle)
        return fits


def largest_rows(peak_of: PeakOf, smoke: bool) -> Iterator[Row]:
    """Yield the largest GPT for each card, for bf16-amp and for each level. Runs `peak_of`."""
    cards = SMOKE_CARDS if smoke else CARDS
    peers, note = find(peak_of, BF16_AMP, cards, smoke)
    for card, num_layers in peers.items():
        yield Row(f"{card}: bf16-amp, without options", _size(num_layers, smoke), note=note)
    for level in LEVELS[:1] if smoke else LEVELS:
        most, note = find(peak_of, Way(level, level), cards, smoke)
        for card, num_layers in most.items():
            ratio = _num_parameters(num_layers, smoke) / _num_parameters(peers[card], smoke)
            peer = f"bf16-amp, without options: {_size(peers[card], smoke)}"
            yield Row(f"{card}: {level}, without options", _size(num_layers, smoke), peer, ratio, TARGET, note)


def find(peak_of: PeakOf, way: Way, cards: dict[str, int], smoke: bool) -> tuple[dict[str, int], str]:
    """Return the most layers that fit each card, and the peaks that say so."""

    def peak(num_layers: int) -> int:
        found = peak_of(lambda device: gpt_step(largest.sizes(num_layers, smoke=smoke), way, 1, device, compiled=None))
        sys.stderr.write(f"{way.name}, {num_layers} layers: {found / GIB:.2f} GiB\n")
        return found

    peaks = peaks_up_to(peak, max(cards.values()))
    tried = ", ".join(f"{num_bytes / GIB:.2f} at {num_layers}" for num_layers, num_bytes in peaks.points)
    return {card: peaks.most_layers(capacity) for card, capacity in cards.items()}, f"GiB at layers: {tried}"


def peaks_up_to(peak: Callable[[int], int], capacity: int) -> Peaks:
    """Return peaks of steps up to one above a capacity. peak: of a step with a number of layers."""
    points = [(num_layers, peak(num_layers)) for num_layers in SMALL_LAYERS]
    while points[-1][1] <= capacity:
        too_many = Peaks(tuple(points[-2:])).most_layers(capacity) + 1
        points.append((too_many, peak(too_many)))
    return Peaks(tuple(points))


def _size(num_layers: int, smoke: bool) -> str:
    return f"{_num_parameters(num_layers, smoke) / 1e9:.2f} B, {num_layers} layers"


def _num_parameters(num_layers: int, smoke: bool) -> int:
    return build_gpt(largest.sizes(num_layers, smoke=smoke), torch.device("meta")).num_parameters
