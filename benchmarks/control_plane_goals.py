"""Measure every goal of the control plane in one go, and say which are reached.

    python -m benchmarks.control_plane_goals --write

It runs `benchmarks.control_plane_submissions`, `benchmarks.control_plane_reports` and `benchmarks.control_plane` one after the
other on this tree with their full sizes: 1,000 event streams, 1 M jobs that ended, 100,000 queued, 1,000 running. Seconds and
rates say something on a quiet machine only, so the load average before and after is part of the result.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

RUNS = {
    "control_plane_submissions": ["--seconds", "3", "--rounds", "1"],
    "control_plane_reports": ["--seconds", "3", "--rounds", "1", "--streams", "1000", "--events", "20"],
    "control_plane": ["--seconds", "2", "--rounds", "1", "--requests", "300"],
}
GOALS = {
    r"sqlite: 16 connections \(1/s\)": (">=", 2000),
    r"sqlite: at 200/s, p99 \(ms\)": ("<=", 25),
    r"heartbeats, 8 connections \(1/s\)": (">=", 2000),
    r"metric samples, batches of 20 \(1/s\)": (">=", 50_000),
    r"metric samples, batches of 1000 \(1/s\)": (">=", 150_000),
    r"lag of events, 1000 streams, p99 \(ms\)": ("<=", 250),
    r"report meanwhile, slowest \(ms\)": ("<=", 50),
    r"memory, idle, without Ray \(MiB\)": ("<=", 120),
    r"/healthz, p50 \(ms\)": ("<=", 1),
    r"one job, p99 \(ms\)": ("<=", 5),
    r"page of 50, p99 \(ms\)": ("<=", 5),
    r"page of 50, 1000000 jobs, p99 \(ms\)": ("<=", 5),
    r"/metrics, 1000000 jobs, p50 \(ms\)": ("<=", 100),
    r"submissions, 16 connections, 100000 queued \(1/s\)": (">=", 2000),
    r"last job, 100000 queued, p99 \(ms\)": ("<=", 5),
    r"page of 50, 100000 queued, p99 \(ms\)": ("<=", 5),
    r"restart to reconciled, 1000 running jobs \(s\)": ("<=", 5),
}
"""Figures, as the benchmarks name them, and their goals. The benchmarks' other figures have none and are shown as they are."""


def figures_of(report: str) -> dict[str, float]:
    """Read the figures of a benchmark's table: name and median of the first tree."""
    rows = re.findall(r"^\| (.+?) \| (-?[\d.]+) \(", report, re.MULTILINE)
    return {name: float(median) for name, median in rows}


def verdicts(figures: dict[str, float]) -> str:
    """Render the goals with what was measured. A goal without a figure is an error of this table: raises ValueError."""
    lines = ["| goal | allowed | measured | reached |", "| --- | ---: | ---: | --- |"]
    for pattern, (relation, bound) in GOALS.items():
        found = [value for name, value in figures.items() if re.fullmatch(pattern, name, re.IGNORECASE)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} figures are named {pattern!r}; there are {sorted(figures)}")
        reached = found[0] >= bound if relation == ">=" else found[0] <= bound
        name = pattern.replace("\\", "")
        lines.append(f"| {name} | {relation} {bound:,} | {found[0]:,.1f} | {'yes' if reached else 'no'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the benchmarks, print their tables as they come, and the goals at the end."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results/")
    options = parser.parse_args()
    began, load = time.monotonic(), os.getloadavg()[0]
    reports = []
    for name, arguments in RUNS.items():
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        reports.append(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        sys.stdout.write(f"{reports[-1]}\n")
        sys.stdout.flush()
    minutes = (time.monotonic() - began) / 60
    title = f"# Goals of the control plane, {datetime.now(UTC):%Y-%m-%d}\n\n{minutes:.0f} minutes, "
    title += f"load average {load:.1f} before and {os.getloadavg()[0]:.1f} after.\n\n"
    goals = title + verdicts({name: value for report in reports for name, value in figures_of(report).items()})
    sys.stdout.write(goals)
    if options.write:
        file = Path(__file__).parent / "results" / f"{datetime.now(UTC):%Y-%m-%d}-control-plane-goals.md"
        file.write_text("\n".join([goals, *(report.replace("# ", "## ", 1) for report in reports)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
