"""Run what half an hour on a GPU machine has time for, in three calls of at most ten minutes.

    python -m benchmarks.gpu.lease 1 --out FOLDER

runs the first call: its benchmarks one after the other, each with sections and a time budget of its own, so that every figure
with a target is reached. `make test-gpu` comes before the first call and needs about three minutes of it.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.session import RESULTS

START_S = 10.0
"""Roughly what Python and the import of torch take before a benchmark's budget begins, and what a last case overruns it."""

TESTS_S = 180.0
CALL_S = 600.0


class Run(NamedTuple):
    """A benchmark, the beginnings of its sections' names (none: all), its time budget, and other options."""

    name: str
    sections: str
    budget_s: float
    options: tuple[str, ...] = ()

    def command(self, out: Path) -> list[str]:
        """Return the words of its command line."""
        words = [sys.executable, "-m", f"benchmarks.gpu.{self.name}", "--budget-s", f"{self.budget_s:g}", "--out", str(out)]
        return [*words, *(("--sections", self.sections) if self.sections else ()), *self.options]


CALLS = (
    (Run("kernels", "quantize,linear", 250), Run("kernels", "adamw", 110)),
    (
        Run("train", "gpt", 100, ("--sizes", "1.3")),
        Run("train", "gpt", 90, ("--sizes", "6.7")),
        Run("train", "largest", 140),
        Run("train", "gpt", 75, ("--sizes", "350")),
        Run("train", "job", 135),
    ),
    (Run("accuracy", "", 380, ("--steps", "1500")), Run("train", "memory,cost,cuda", 185, ("--sizes", "1.3"))),
)


def main() -> int:
    """Run a call. Returns 1 if one of its benchmarks ended with an error; the others run all the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", type=int, choices=range(1, len(CALLS) + 1))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the tables")
    options = parser.parse_args()
    failed = [run for run in CALLS[options.call - 1] if subprocess.run(run.command(options.out), check=False).returncode]
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
