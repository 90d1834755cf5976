"""Measure every goal of the control plane in one go, and say which are reached.

    python -m benchmarks.control_plane_goals --write

It runs `benchmarks.control_plane_submissions`, `benchmarks.control_plane_reports` and `benchmarks.control_plane` one after the
other on this tree with their full sizes: 1,000 event streams, 1 M jobs that ended, 100,000 queued, 1,000 running. Seconds and
rates say something on a quiet machine only, so its load average and its speed at a fixed loop are part of the result.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

RUNS = {
    "control_plane_submissions": ["--seconds", "3", "--rounds", "3"],
    "control_plane_reports": ["--seconds", "3", "--rounds", "3", "--streams", "1000", "--events", "20"],
    "control_plane": ["--seconds", "2", "--rounds", "1", "--requests", "300"],
}
GOALS: dict[str, tuple[str, float, float]] = {
    r"sqlite: 16 connections \(1/s\)": (">=", 800, 2000),
    r"sqlite: at 200/s, p99 \(ms\)": ("<=", 25, 25),
    r"postgresql: 16 connections \(1/s\)": (">=", 800, 2000),
    r"postgresql: at 200/s, p99 \(ms\)": ("<=", 25, 25),
    r"heartbeats, 8 connections \(1/s\)": (">=", 2000, 2000),
    r"metric samples, batches of 20 \(1/s\)": (">=", 50_000, 50_000),
    r"metric samples, batches of 1000 \(1/s\)": (">=", 150_000, 150_000),
    r"lag of events, 1000 streams, p99 \(ms\)": ("<=", 250, 250),
    r"report meanwhile, slowest \(ms\)": ("<=", 50, 50),
    r"memory, idle, without Ray \(MiB\)": ("<=", 120, 120),
    r"/healthz, p50 \(ms\)": ("<=", 1, 1),
    r"one job, p99 \(ms\)": ("<=", 5, 5),
    r"page of 50, p99 \(ms\)": ("<=", 10, 5),
    r"page of 50, 1000000 jobs, p99 \(ms\)": ("<=", 10, 5),
    r"/metrics, 1000000 jobs, p50 \(ms\)": ("<=", 100, 100),
    r"submissions, 16 connections, 100000 queued \(1/s\)": (">=", 800, 2000),
    r"last job, 100000 queued, p99 \(ms\)": ("<=", 5, 5),
    r"page of 50, 100000 queued, p99 \(ms\)": ("<=", 10, 5),
    r"restart to reconciled, 1000 running jobs \(s\)": ("<=", 5, 5),
}
"""Figures, as the benchmarks name them, and two bounds: to ship, and to be ahead. The benchmarks' other figures have none."""


def speed_of_machine() -> float:
    """Milliseconds of a fixed loop of Python, the median of nine. Virtual machines slow down by half with no load of their own,
    and a figure from such a minute says nothing of the tree."""
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        sum(number * number for number in range(300_000))
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


def figures_of(report: str) -> dict[str, float]:
    """Read the figures of a benchmark's table: name and median of the first tree."""
    rows = re.findall(r"^\| (.+?) \| (-?[\d.]+) \(", report, re.MULTILINE)
    return {name: float(median) for name, median in rows}


def verdicts(figures: dict[str, float]) -> str:
    """Render the goals with what was measured. A goal without a figure is an error of this table: raises ValueError."""
    lines = ["| goal | ship | ahead | measured | reached |", "| --- | ---: | ---: | ---: | --- |"]
    for pattern, (relation, ship, ahead) in GOALS.items():
        found = [value for name, value in figures.items() if re.fullmatch(pattern, name, re.IGNORECASE)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} figures are named {pattern!r}; there are {sorted(figures)}")
        sign = 1 if relation == ">=" else -1
        reached = "ahead" if sign * found[0] >= sign * ahead else "ship" if sign * found[0] >= sign * ship else "no"
        name = pattern.replace("\\", "")
        lines.append(f"| {name} | {relation} {ship:,} | {relation} {ahead:,} | {found[0]:,.1f} | {reached} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the benchmarks, print their tables as they come, and the goals at the end."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results/")
    options = parser.parse_args()
    began, load = time.monotonic(), os.getloadavg()[0]
    reports, speeds = [], [speed_of_machine()]
    for name, arguments in RUNS.items():
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        reports.append(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        sys.stdout.write(f"{reports[-1]}\n")
        sys.stdout.flush()
        speeds.append(speed_of_machine())
    minutes = (time.monotonic() - began) / 60
    title = f"# Goals of the control plane, {datetime.now(UTC):%Y-%m-%d}\n\n{minutes:.0f} minutes, "
    title += f"load average {load:.1f} before and {os.getloadavg()[0]:.1f} after.\n"
    title += f"A fixed loop of Python took {', '.join(f'{speed:.0f}' for speed in speeds)} ms before, between and after.\n\n"
    goals = title + verdicts({name: value for report in reports for name, value in figures_of(report).items()})
    sys.stdout.write(goals)
    if options.write:
        file = Path(__file__).parent / "results" / f"{datetime.now(UTC):%Y-%m-%d}-control-plane-goals.md"
        file.write_text("\n".join([goals, *(report.replace("# ", "## ", 1) for report in reports)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
