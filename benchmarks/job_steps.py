"""Compare the steps of a job with those of a bare loop, which `benchmarks/job_overhead.py` measures in turns.

Each step of the job lies between two bare ones, and is compared with their mean: load, clocks and caches that change slowly
touch the three alike. A round is one job; its added time is the mean over its steps, without the tenth at each end. Rounds are
independent of each other, so the interval is that of their mean. Other threads count with all of their CPU time, also with
what they use during bare steps: work that comes once a second counts up to twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from benchmarks.figures import Figure
from octet.api_schemas.paired import Interval

LIMIT = 0.97


@dataclass
class Found:
    """Seconds of CPU time of the main thread in the steps of one round. One more bare step than the job's."""

    bare_s: list[float] = field(default_factory=list)
    job_s: list[float] = field(default_factory=list)
    threads_s: float = 0.0
    """CPU time of all other threads, over all steps."""

    @property
    def step_s(self) -> float:
        """CPU time of a bare step."""
        return _trimmed_mean(self.bare_s)

    @property
    def added_s(self) -> float:
        """Additional CPU time of a job's step, over all threads."""
        around = [(before + after) / 2 for before, after in pairwise(self.bare_s)]
        main_s = _trimmed_mean([own - bare for own, bare in zip(self.job_s, around, strict=True)])
        return main_s + self.threads_s / len(self.job_s)

    @property
    def throughput(self) -> float:
        """The job's, relative to the bare loop's, by the CPU time of all threads."""
        return self.step_s / (self.step_s + self.added_s)


def _trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the tenth of the values at each end."""
    cut = len(values) // 10
    return fmean(sorted(values)[cut : len(values) - cut])


def throughput(rounds: Sequence[Found]) -> Interval:
    """Return the mean throughput over the rounds with its 95 % interval; a single round has none."""
    values = [found.throughput for found in rounds]
    return Interval.of(values) if len(values) > 1 else Interval(values[0], float("nan"))


def holds(rounds: Sequence[Found]) -> bool:
    """Return True if the whole interval of the throughput lies above the limit."""
    ratio = throughput(rounds)
    return ratio.mean - ratio.half_width >= LIMIT


def figures(found: Mapping[tuple[str, str], Sequence[Found]]) -> list[Figure]:
    """Return the throughput of each level and receiver against the bare loop's."""
    rows = []
    for (level, reports), rounds in found.items():
        ratio, name = throughput(rounds), f"job: {level}, reports to {reports}, throughput by CPU time / bare loop"
        rows.append(Figure(name, f"{ratio.mean:.3f}", f"± {ratio.half_width:.3f}", f">= {LIMIT}"))
    return rows
