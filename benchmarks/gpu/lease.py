"""Run what half an hour on a GPU machine has time for, in three calls of at most ten minutes.

    python -m benchmarks.gpu.lease 1 --out FOLDER

runs the first call: the tests of `make test-gpu`, then its benchmarks one after the other, each with sections and a time budget
of its own, so that every figure with a target is reached. What hangs is ended when it takes the time of those after it.
Everything that is printed goes into FOLDER/lease-1.log; of each part the end is printed here.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

from benchmarks.figures import OUT

START_S = 10.0
"""Roughly what Python and the import of torch take before a benchmark's budget begins, and what a last case overruns it."""

TESTS = "tests"
CALL_S = 590.0
"""Ten minutes without the installation of wheels before."""

GRACE_S = 5.0
"""Time for an interrupted part to end: pytest lists the failures so far."""

SHOWN = 2000
"""Characters of each part's output that are printed: the tool that lends the machine returns the last 12,000 of a call."""


class Run(NamedTuple):
    """A benchmark or TESTS, the beginnings of its sections' names (none: all), its time budget, and other options."""

    name: str
    sections: str
    budget_s: float
    options: tuple[str, ...] = ()

    def command(self, out: Path) -> list[str]:
        """Return the words of its command line."""
        if self.name == TESTS:
            return ["make", "test-gpu", f"GPU_PYTHON={sys.executable}"]
        words = [sys.executable, "-m", f"benchmarks.gpu.{self.name}", "--budget-s", f"{self.budget_s:g}", "--out", str(out)]
        words += ["--write", str(out / "RESULTS.md")]
        return [*words, *(("--sections", self.sections) if self.sections else ()), *self.options]


CALLS = (
    (Run(TESTS, "", 170), Run("kernels", "quantize,linear", 250), Run("kernels", "adamw", 110)),
    (
        Run("train", "gpt", 95, ("--sizes", "1.3")),
        Run("train", "gpt", 90, ("--sizes", "6.7")),
        Run("train", "largest", 140),
        Run("train", "gpt", 75, ("--sizes", "350")),
        Run("train", "job", 130),
    ),
    (Run("accuracy", "", 375, ("--steps", "1500")), Run("train", "memory,cost,cuda", 190, ("--sizes", "1.3"))),
)


def main() -> int:
    """Run a call. Returns 1 if one of its parts ended with an error; the others run all the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", type=int, choices=range(1, len(CALLS) + 1))
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the tables and RESULTS.md")
    options = parser.parse_args()
    began, runs = time.monotonic(), CALLS[options.call - 1]
    options.out.mkdir(parents=True, exist_ok=True)
    statuses = []
    with (options.out / f"lease-{options.call}.log").open("ab") as log:
        for number, run in enumerate(runs):
            later_s = sum(later.budget_s + START_S for later in runs[number + 1 :])
            left_s = CALL_S - GRACE_S - (time.monotonic() - began) - later_s
            started = time.monotonic()
            status, end = run_part(run.command(options.out), log, left_s)
            name = " ".join(word for word in (run.name, run.sections, *run.options) if word)
            how = f"ended after {left_s:.0f} s, which it had" if status is None else f"exit status {status}"
            sys.stdout.write(f"\n== {name}: {how}; {time.monotonic() - started:.0f} s\n{end}\n")
            sys.stdout.flush()
            statuses.append(status)
    return int(any(status != 0 for status in statuses))


def run_part(command: list[str], log: BinaryIO, limit_s: float) -> tuple[int | None, str]:
    """Run a command that prints into the log. Returns its exit status, None if it was ended, and what it printed last."""
    log.write(f"\n$ {' '.join(command)}\n".encode())
    log.flush()
    first = log.tell()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    part = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0, preexec_fn=_hear_interrupts
    )
    try:
        status: int | None = part.wait(max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        status = None
        os.killpg(part.pid, signal.SIGINT)
        try:
            part.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(part.pid, signal.SIGKILL)
            part.wait()
    with Path(log.name).open("rb") as printed:
        printed.seek(first)
        return status, printed.read().decode(errors="replace")[-SHOWN:]


def _hear_interrupts() -> None:
    """A shell has what it runs in the background ignore SIGINT, and children inherit it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    raise SystemExit(main())
