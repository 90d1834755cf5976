"""Compare the steps of a job with those of a bare loop, which `benchmarks/job_overhead.py` measures in turns.

Each step of the job lies between two bare ones, and is compared with their mean: load, clocks and caches that change slowly
touch the three alike. A round is one job; its added time is the mean over its steps, without the tenth at each end. Rounds are
independent of each other, so the interval is that of their mean. Other threads count with all of their CPU time, also with
what they use during bare steps: work that comes once a second counts up to twice.
"""

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from statistics import fmean

import torch

from benchmarks.figures import Figure
from octet.api_schemas.paired import Interval

LIMIT = 0.97


@dataclass
class Found:
    """Seconds of the steps of one round, of CPU time of the main thread and on the clock. One more bare step than the job's."""

    bare_s: list[float] = field(default_factory=list)
    job_s: list[float] = field(default_factory=list)
    bare_wall_s: list[float] = field(default_factory=list)
    job_wall_s: list[float] = field(default_factory=list)
    threads_s: float = 0.0
    """CPU time of all other threads, over all steps."""
    by_thread_s: dict[str, float] = field(default_factory=dict)
    """The part of it that the job's own threads used, by their names."""

    @property
    def step_s(self) -> float:
        """CPU time of a bare step."""
        return _trimmed_mean(self.bare_s)

    @property
    def added_s(self) -> float:
        """Additional CPU time of a job's step, over all threads."""
        return self.main_added_s + self.threads_s / len(self.job_s)

    @property
    def main_added_s(self) -> float:
        """The part of it on the main thread."""
        return _added(self.bare_s, self.job_s)

    @property
    def throughput(self) -> float:
        """The job's, relative to the bare loop's, by the CPU time of all threads."""
        return self.step_s / (self.step_s + self.added_s)

    @property
    def wall_throughput(self) -> float:
        """The same on the clock, where other threads cost what they take from the main thread."""
        step_s = _trimmed_mean(self.bare_wall_s)
        return step_s / (step_s + _added(self.bare_wall_s, self.job_wall_s))


def _added(bare_s: Sequence[float], job_s: Sequence[float]) -> float:
    around = [(before + after) / 2 for before, after in pairwise(bare_s)]
    return _trimmed_mean([own - bare for own, bare in zip(job_s, around, strict=True)])


def _trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the tenth of the values at each end."""
    cut = len(values) // 10
    return fmean(sorted(values)[cut : len(values) - cut])


def interval(rounds: Sequence[Found], value: Callable[[Found], float]) -> Interval:
    """The mean of a value over the rounds with its 95 % interval; a single round has none."""
    values = [value(found) for found in rounds]
    return Interval.of(values) if len(values) > 1 else Interval(values[0], float("nan"))


def holds(rounds: Sequence[Found]) -> bool:
    """Return True if the whole interval of the throughput lies above the limit."""
    ratio = interval(rounds, lambda found: found.throughput)
    return ratio.mean - ratio.half_width >= LIMIT


def smallest_step_s(added_s: float) -> float:
    """The bare step from which so much more is within the limit."""
    return max(0.0, added_s) * LIMIT / (1 - LIMIT)


def figures(found: Mapping[tuple[str, str], Sequence[Found]]) -> list[Figure]:
    """Return the throughput of each level and receiver against the bare loop's."""
    return [
        Figure(f"job: {level}, reports to {reports}, throughput by CPU time / bare loop", *_cells(rounds), f">= {LIMIT}")
        for (level, reports), rounds in found.items()
    ]


def _cells(rounds: Sequence[Found]) -> tuple[str, str]:
    ratio = interval(rounds, lambda found: found.throughput)
    return f"{ratio.mean:.3f}", f"± {ratio.half_width:.3f}"


def table(found: Mapping[tuple[str, str], Sequence[Found]], model: str) -> str:
    """Format the rounds of each level and receiver as a page. model: what was trained, in words."""
    lines = [
        f"# A job's steps against a bare loop's, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m benchmarks.job_overhead {' '.join(sys.argv[1:])}`, torch {torch.__version__}, Python "
        f"{platform.python_version()}, one thread, {os.cpu_count()} cores under a load of {os.getloadavg()[1]:.0f}. "
        f"{model}. Means over rounds with the 95 % interval of Student's t; a step of the job is compared with the bare ones "
        "before and after it. `holds from`: the bare step from which the mean of what is added is within 3 %.",
        "",
        "| level | reports to | rounds × steps | bare step (ms) | added, all threads (ms) | of it main thread (ms) "
        "| holds from (ms) | throughput on the clock | throughput by CPU time |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (level, reports), rounds in found.items():
        added = interval(rounds, lambda found: found.added_s * 1e3)
        cells = (
            level,
            reports,
            f"{len(rounds)} × {len(rounds[0].job_s)}",
            f"{fmean(each.step_s for each in rounds) * 1e3:.1f}",
            _written(added, 2),
            f"{fmean(each.main_added_s for each in rounds) * 1e3:.2f}",
            f"{smallest_step_s(added.mean):.0f}",
            _written(interval(rounds, lambda found: found.wall_throughput), 3),
            _written(interval(rounds, lambda found: found.throughput), 3),
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "CPU time of the job's own threads, ms of a step:", ""]
    for (level, reports), rounds in found.items():
        threads = sorted({name for each in rounds for name in each.by_thread_s})
        used = (f"{name} {fmean(each.by_thread_s[name] / len(each.job_s) for each in rounds) * 1e3:.3f}" for name in threads)
        lines.append(f"- {level}, {reports}: {', '.join(used)}")
    return "\n".join(lines) + "\n"


def _written(value: Interval, num_digits: int) -> str:
    return f"{value.mean:.{num_digits}f} ± {value.half_width:.{num_digits}f}"
