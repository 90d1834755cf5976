"""Gaps between runs that differ in one thing, paired by seed: mean, 95 % interval of Student's t, and what they show.

One seed proves nothing where chance alone moves a loss by as much as the gap. Paired runs share initial values and batches, so
that what remains is the thing in question and the chance that the setting lets through. `moved_by_chance` measures the latter.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
)  # fmt: skip
"""Student's t at 97.5 %, for 1 to 19 degrees of freedom."""
MAX_VALUES = len(T_975) + 1


@dataclass(frozen=True)
class Interval:
    """mean ± half_width holds the true mean with 95 %, if seeds differ by normal chance."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """The interval of the mean of 2 to 20 values. ValueError for another number."""
        if not 2 <= len(values) <= MAX_VALUES:
            raise ValueError(f"got {len(values)} values; allowed: 2 to {MAX_VALUES}.")
        half_width = T_975[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5
        return cls(statistics.fmean(values), half_width)

    def verdict(self, limit: float) -> str:
        """Compare the interval with ± limit: inside, outside, or open."""
        if abs(self.mean) + self.half_width <= limit:
            return "inside"
        return "outside" if abs(self.mean) - self.half_width > limit else "open"

    @property
    def is_zero(self) -> bool:
        """True if zero lies within the interval."""
        return abs(self.mean) <= self.half_width

    def __str__(self) -> str:
        return f"{100 * self.mean:+.2f} ± {100 * self.half_width:.2f} %"


def gaps(losses: Sequence[float], references: Sequence[float]) -> list[float]:
    """The relative gap of each loss to the reference of the same seed; a positive gap is worse."""
    return [loss / reference - 1 for loss, reference in zip(losses, references, strict=True)]


def moved_by_chance(losses: Sequence[float], references: Sequence[float]) -> float:
    """The mean size of a gap that means nothing: `losses` come from a start that hardly differs from the references'."""
    return statistics.fmean(abs(gap) for gap in gaps(losses, references))


def why_not_calm(moved: float, limit: float) -> str | None:
    """A message where chance alone moves a loss by more than a third of the limit that is to be shown; else None."""
    if moved <= limit / 3:
        return None
    return (
        f"the setting is not calm: a tiny change of fp32's start moves its final loss by {moved:.3%}; allowed: "
        f"{limit / 3:.3%}, a third of the limit of {limit:.2%}. Lower the learning rate, or raise the number of steps."
    )
