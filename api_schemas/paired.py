"""Gaps between runs that differ in one thing, paired by seed: mean, 95 % interval of Student's t, and what they show.

One seed proves nothing where chance alone moves a loss by as much as the gap. Paired runs share initial values and batches, so
that what remains is the thing in question and the chance that the setting lets through. `moved_by_chance` measures the latter.

Whoever looks after each seed and stops once an interval is clear has many chances to be wrong. `error_of_look` divides the 5 %
over the planned looks: Lan and DeMets, Biometrika 70 (1983), with the spending function of O'Brien and Fleming's bounds. The
parts are added up as they are (Bonferroni), so that nothing is assumed of how the intervals of few seeds depend on each other.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

ERROR = 0.05
"""The chance that an interval misses the true mean; of all looks together."""
START_CHANGE = 1e-3
"""The relative change of a start by which the noise of a setting is measured."""
MOST_SEEDS = 200
"""More seeds than that are not counted up to."""

Answer = Literal["yes", "no", "open"]


@cache
def t_quantile(num_degrees: int, error: float = ERROR) -> float:
    """Return Student's t that |t| exceeds with the chance `error`: Abramowitz and Stegun 26.7.3 and 4, solved by halving."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, num_degrees) < 1 - error else (low, middle)
    return math.sqrt(num_degrees) * math.tan(high)


def _share_within(angle: float, num_degrees: int) -> float:
    """Return the chance that |t| is below √degrees · tan(angle)."""
    is_odd, cosine = num_degrees % 2, math.cos(angle)
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for power in range(1 + is_odd, num_degrees, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    sum_of_powers = math.sin(angle) * total
    return 2 / math.pi * (angle + sum_of_powers) if is_odd else sum_of_powers


def deviation_of(values: Sequence[float]) -> float:
    """Return the standard deviation of at least 2 values. statistics.stdev computes in fractions: ten times as long."""
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


@dataclass(frozen=True)
class Interval:
    """mean ± half_width holds the true mean with 95 %, if seeds differ by normal chance."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float], error: float = ERROR) -> "Interval":
        """The interval of the mean of at least 2 values. ValueError for fewer. error: the chance to miss."""
        if len(values) < 2:
            raise ValueError(f"got {len(values)} values; allowed: 2 or more.")
        half_width = t_quantile(len(values) - 1, error) * deviation_of(values) / len(values) ** 0.5
        return cls(statistics.fmean(values), half_width)

    def verdict(self, limit: float) -> str:
        """Compare the interval with ± limit: inside, outside, or open."""
        if abs(self.mean) + self.half_width <= limit:
            return "inside"
        return "outside" if abs(self.mean) - self.half_width > limit else "open"

    def is_at_most(self, limit: float) -> Answer:
        """Answer the question: is the true mean at most `limit`?"""
        if self.mean + self.half_width <= limit:
            return "yes"
        return "no" if self.mean - self.half_width > limit else "open"

    @property
    def is_zero(self) -> bool:
        """True if zero lies within the interval."""
        return abs(self.mean) <= self.half_width

    def __str__(self) -> str:
        return f"{100 * self.mean:+.2f} ± {100 * self.half_width:.2f} %"


def gaps(losses: Sequence[float], references: Sequence[float]) -> list[float]:
    """The relative gap of each loss to the reference of the same seed; a positive gap is worse. No reference is zero."""
    return [(loss - reference) / abs(reference) for loss, reference in zip(losses, references, strict=True)]


def moved_by_chance(losses: Sequence[float], references: Sequence[float]) -> float:
    """The mean size of a gap that means nothing: `losses` come from a start that hardly differs from the references'."""
    return statistics.fmean(abs(gap) for gap in gaps(losses, references))


def why_not_calm(moved: float, limit: float) -> str | None:
    """A message where chance alone moves a loss by more than a third of the limit that is to be shown; else None."""
    if moved <= limit / 3:
        return None
    return (
        f"the setting is not calm: a tiny change of the baseline's start moves its final loss by {moved:.3%}; allowed: "
        f"{limit / 3:.3%}, a third of the limit of {limit:.2%}. Lower the learning rate, or raise the number of steps."
    )


def error_of_look(num_values: int, num_planned: int, num_first: int = 2) -> float:
    """Return the chance to be wrong that the look after so many of the planned values may take.

    num_first: the values of the first look.
    """
    return _spent(num_values / num_planned) - (_spent((num_values - 1) / num_planned) if num_values > num_first else 0.0)


def _spent(share: float) -> float:
    """Return the part of the error that is spent once this share of the values is there."""
    normal = statistics.NormalDist()
    return 2 - 2 * normal.cdf(normal.inv_cdf(1 - ERROR / 2) / math.sqrt(share))


@dataclass(frozen=True)
class Look:
    """The first look at which the answer was certain, or else the last one. num_values: those that it saw."""

    num_values: int
    interval: Interval
    answer: Answer


def look(values: Sequence[float], limit: float, num_planned: int, num_first: int = 2) -> Look | None:
    """Look after each value: is the true mean at most `limit`? None before the first look.

    num_first: the values of the first look, at least 2.
    """
    found = None
    for num_values in range(num_first, min(len(values), num_planned) + 1):
        interval = Interval.of(values[:num_values], error_of_look(num_values, num_planned, num_first))
        found = Look(num_values, interval, interval.is_at_most(limit))
        if found.answer != "open":
            break
    return found


def num_needed(values: Sequence[float], limit: float, num_planned: int | None, num_first: int = 2) -> int | None:
    """Estimate how many values would make the answer certain, if mean and spread stay. None: more than `MOST_SEEDS`.

    num_planned, num_first: of looks after each value; num_planned is None for one look at all of them.
    """
    distance, deviation = abs(limit - statistics.fmean(values)), deviation_of(values)
    for number in range(len(values) + 1, MOST_SEEDS + 1):
        error = ERROR if num_planned is None else error_of_look(number, max(number, num_planned), num_first)
        if t_quantile(number - 1, error) * deviation / number**0.5 < distance:
            return number
    return None
