"""Measure the floors of the control plane in one run, and print which are held.

    python -m benchmarks.control_plane_goals --write

It runs `benchmarks.control_plane_submissions`, `benchmarks.control_plane_reports` and `benchmarks.control_plane` one after the
other on this tree with their full sizes: 1, 2 and 4 api processes on PostgreSQL, 1,000 event streams, 1 M jobs that ended.
Seconds and rates need a quiet machine, so its load average and its speed at a fixed loop are part of the result.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime

from benchmarks.figures import Figure, add_write_option, command_line, write

RUNS = {
    "control_plane_submissions": "--seconds 3 --rounds 3 --processes 1 --processes 2 --processes 4",
    "control_plane_reports": "--seconds 3 --rounds 3 --streams 1000 --events 20",
    "control_plane": "--rounds 1 --requests 3000",
}
FLOORS: dict[str, tuple[str, float] | None] = {
    "sqlite: 16 connections (1/s)": (">=", 800),
    "postgresql: 16 connections (1/s)": (">=", 800),
    "sqlite: 16 connections, clients' mix (1/s)": (">=", 500),
    "postgresql: 16 connections, clients' mix (1/s)": (">=", 500),
    "heartbeats, 8 connections (1/s)": (">=", 2000),
    "one job, 1000000 jobs, p99 (ms)": ("<=", 5),
    "page of 50, 1000000 jobs, p99 (ms)": ("<=", 15),
    "lag of events, 1000 streams, p99 (ms)": ("<=", 300),
    "postgresql: 1 api processes (1/s)": None,
    "postgresql: 2 api processes (1/s)": None,
    "postgresql: 4 api processes (1/s)": None,
}
"""Figures, as the benchmarks name them, and what each has to hold. Those without a floor are shown: where more comes from."""


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


def rows_of(figures: dict[str, float]) -> list[Figure]:
    """Make the rows of RESULTS.md."""
    bounds = {name: "" if floor is None else f"{floor[0]} {floor[1]:,}" for name, floor in FLOORS.items()}
    return [Figure(f"control plane: {name}", f"{figures[name]:,.1f}", goal=bound) for name, bound in bounds.items()]


def verdicts(figures: dict[str, float]) -> str:
    """Render the floors with what was measured. Raises ValueError for a floor without a figure: an error of this table."""
    if missing := FLOORS.keys() - figures.keys():
        raise ValueError(f"no figures are named {sorted(missing)}; there are {sorted(figures)}")
    lines = ["| figure | floor | measured | held |", "| --- | ---: | ---: | --- |"]
    for name, floor in FLOORS.items():
        bound, held = "", ""
        if floor is not None:
            relation, value = floor
            bound = f"{relation} {value:,}"
            held = "yes" if (figures[name] >= value if relation == ">=" else figures[name] <= value) else "no"
        lines.append(f"| {name} | {bound} | {figures[name]:,.1f} | {held} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the benchmarks, print their tables as they come, and the floors at the end."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_write_option(parser)
    options = parser.parse_args()
    began, load = time.monotonic(), os.getloadavg()[0]
    reports, speeds = [], [speed_of_machine()]
    for name, arguments in RUNS.items():
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments.split()]
        reports.append(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        sys.stdout.write(f"{reports[-1]}\n")
        sys.stdout.flush()
        speeds.append(speed_of_machine())
    minutes = (time.monotonic() - began) / 60
    title = f"# Floors of the control plane, {datetime.now(UTC):%Y-%m-%d}\n\n{minutes:.0f} minutes, "
    title += f"load average {load:.1f} before and {os.getloadavg()[0]:.1f} after.\n"
    title += f"A fixed loop of Python took {', '.join(f'{speed:.0f}' for speed in speeds)} ms before, between and after.\n\n"
    figures = {name: value for report in reports for name, value in figures_of(report).items()}
    sys.stdout.write(title + verdicts(figures))
    if options.write:
        write(options.write, rows_of(figures), command_line("benchmarks.control_plane_goals", sys.argv[1:]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
