"""Measure on one GPU what this project only predicts, in half an hour: `make gpu-day`.

    python -m benchmarks.gpu.day [--part 2] [--out FOLDER] [--into FOLDER]

runs three parts of at most ten minutes: the tests of `make test-gpu`, then the benchmarks one after the other, each with
sections and a time budget of its own. What hangs is ended when it takes the time of those after it. A step that has ended well
on this device and commit is not run again: the same command continues a run that was stopped, or that has a failed step.

FOLDER/part-N has a part's tables, its log and `part.json`. After each step all tables of the day are put into one document in
`benchmarks/results/`: first what contradicts its prediction, then every row beside its prediction; figures with goals go into
`benchmarks/RESULTS.md`. `--collect` writes these from FOLDER alone, for parts that were run on other machines.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple

from benchmarks import figures
from benchmarks.gpu.report import BESIDE_PREDICTIONS, ERROR, MISSING, NOT_REACHED, OUT_OF_MEMORY

DAY_OUT = figures.OUT.with_name("gpu-day")
"""The default folder for parts. Git ignores it."""

START_S = 10.0
"""Roughly what Python and the import of torch take before a benchmark's budget begins, and what a last case overruns it."""

TESTS = "tests"
PART_S = 590.0
"""Ten minutes without the installation of wheels before."""

GRACE_S = 5.0
"""Time for an interrupted step to end: pytest lists the failures so far."""

SHOWN = 2000
"""Characters of each step's output that are printed; part-N/log.txt has all of it."""

PROBE = """
import json, sys, torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA device")
import numpy, pydantic, safetensors
print(json.dumps([torch.cuda.get_device_name(), torch.cuda.get_device_capability()]))
"""
FIRST_CAPABILITY = [8, 9]


class Step(NamedTuple):
    """A benchmark or TESTS, the beginnings of its sections' names (none: all), its time budget, and other options."""

    name: str
    sections: str
    budget_s: float
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(word for word in (self.name, self.sections, *self.options) if word)

    def command(self, out: Path) -> list[str]:
        """Return the words of its command line. out: the part's folder."""
        if self.name == TESTS:
            return ["make", "test-gpu", f"GPU_PYTHON={sys.executable}"]
        words = [sys.executable, "-m", f"benchmarks.gpu.{self.name}", "--budget-s", f"{self.budget_s:g}", "--out", str(out)]
        words += ["--write", str(out / "RESULTS.md")]
        return [*words, *(("--sections", self.sections) if self.sections else ()), *self.options]


PARTS: tuple[tuple[Step, ...], ...] = (
    (Step(TESTS, "", 170), Step("kernels", "quantize,linear", 250), Step("kernels", "adamw", 110)),
    (
        Step("train", "gpt", 95, ("--sizes", "1.3")),
        Step("train", "gpt", 90, ("--sizes", "6.7")),
        Step("train", "largest", 140),
        Step("train", "gpt", 75, ("--sizes", "350")),
        Step("train", "job", 130),
    ),
    (Step("accuracy", "", 375, ("--steps", "1500")), Step("train", "memory,cost,cuda", 190, ("--sizes", "1.3"))),
)


@dataclass(frozen=True)
class Done:
    """The end of a step. status: None if it was ended for its time. table: the name of its table, if it wrote one."""

    status: int | None
    seconds: float
    table: str | None


@dataclass
class Part:
    """A part in its folder: the device and the commit that it was run on, and its steps by name."""

    folder: Path
    device: str
    commit: str
    date: str
    steps: dict[str, Done]

    @classmethod
    def read(cls, folder: Path) -> "Part | None":
        """Read a part's folder; None without one."""
        path = folder / "part.json"
        if not path.exists():
            return None
        held = json.loads(path.read_text("utf-8"))
        steps = {name: Done(**step) for name, step in held.pop("steps").items()}
        return cls(folder, **held, steps=steps)

    @classmethod
    def begun(cls, folder: Path, device: str, commit: str) -> "Part":
        """Continue a part of the same device and commit, or begin it. What another one left stays in the folder, uncited."""
        found = cls.read(folder)
        if found and (found.device, found.commit) == (device, commit):
            return found
        return cls(folder, device, commit, f"{datetime.now(UTC):%Y-%m-%d}", {})

    def add(self, step: Step, done: Done) -> None:
        """Note how a step ended."""
        self.steps[str(step)] = done
        held = {
            "device": self.device,
            "commit": self.commit,
            "date": self.date,
            "steps": {name: asdict(each) for name, each in self.steps.items()},
        }
        (self.folder / "part.json").write_text(json.dumps(held, indent=1) + "\n", "utf-8")

    def has(self, step: Step) -> bool:
        """Return True if a step has ended well."""
        done = self.steps.get(str(step))
        return done is not None and done.status == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are left. Returns 1 if a step ended with an error; the others run all the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=range(1, len(PARTS) + 1), help="this part alone; default: all, in order")
    parser.add_argument("--out", type=Path, default=DAY_OUT, help="folder of the parts")
    parser.add_argument("--into", type=Path, default=figures.RESULTS.parent, help="folder with RESULTS.md and results/")
    parser.add_argument("--collect", action="store_true", help="run nothing; write the document from the folder of the parts")
    options = parser.parse_args(arguments)
    if options.collect:
        sys.stdout.write(f"{collect(options.out, options.into)}\n")
        return 0
    device, commit = probe(), figures.commit()
    numbers = [options.part] if options.part else range(1, len(PARTS) + 1)
    has_failed = False
    for number in numbers:
        part = Part.begun(options.out / f"part-{number}", device, commit)
        has_failed |= not run_part(number, part, options.into)
    sys.stdout.write(f"\n{collect(options.out, options.into)}\n")
    return int(has_failed)


def probe() -> str:
    """Return the name of the device. Ends the run where there is none that FP8 products run on, or a package is missing."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise SystemExit(
            f"make gpu-day: {reason}. It needs an NVIDIA GPU and the Python that has torch for it, NumPy, pydantic and "
            "safetensors. Set GPU_PYTHON=/path/to/python3; docs/gpu-day.md says how packages get to a machine without network."
        )
    name, capability = json.loads(done.stdout.splitlines()[-1])
    if capability < FIRST_CAPABILITY:
        raise SystemExit(
            f"make gpu-day: {name} has compute capability {capability[0]}.{capability[1]}; allowed: 8.9 or later, which "
            "multiply in FP8. Run it on an H100, an H200, an L40S or a later card."
        )
    return str(name)


def run_part(number: int, part: Part, into: Path) -> bool:
    """Run a part's steps that are left, within PART_S. Returns False if one did not end well."""
    steps, began = [step for step in PARTS[number - 1] if not part.has(step)], time.monotonic()
    skipped = len(PARTS[number - 1]) - len(steps)
    sys.stdout.write(
        f"\n=== part {number} of {len(PARTS)}, on {part.device}" + (f"; {skipped} steps are done\n" if skipped else "\n")
    )
    part.folder.mkdir(parents=True, exist_ok=True)
    with (part.folder / "log.txt").open("ab") as log:
        for index, step in enumerate(steps):
            later_s = sum(later.budget_s + START_S for later in steps[index + 1 :])
            left_s = PART_S - GRACE_S - (time.monotonic() - began) - later_s
            started, tables = time.monotonic(), set(part.folder.glob("*-gpu-*.md"))
            status, end = run_step(step.command(part.folder), log, left_s)
            written = sorted(path.name for path in set(part.folder.glob("*-gpu-*.md")) - tables)
            seconds = time.monotonic() - started
            part.add(step, Done(status, round(seconds, 1), written[-1] if written else None))
            how = f"ended after {left_s:.0f} s, which it had" if status is None else f"exit status {status}"
            sys.stdout.write(f"\n== {step}: {how}; {seconds:.0f} s\n{end}\n")
            sys.stdout.flush()
            collect(part.folder.parent, into)
    return all(part.has(step) for step in PARTS[number - 1])


def run_step(command: list[str], log: BinaryIO, limit_s: float) -> tuple[int | None, str]:
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


def collect(out: Path, into: Path) -> str:
    """Write the day's document and the rows with goals from the folders of the parts. Returns what is left to do."""
    parts = {number: Part.read(out / f"part-{number}") for number in range(1, len(PARTS) + 1)}
    found = {number: part for number, part in parts.items() if part is not None and part.steps}
    if not found:
        return f"{out} has no part; run make gpu-day."
    for part in found.values():
        if (part.folder / "RESULTS.md").exists():
            _, rows, _ = figures.read(part.folder / "RESULTS.md")
            figures.save(
                into / "RESULTS.md", [row if row.commit else replace(row, commit=part.commit) for row in rows.values()]
            )
    path = _document_path(into, found)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(found), "utf-8")
    for picture in (picture for part in found.values() for picture in part.folder.glob("*.png")):
        shutil.copy(picture, path.with_name(picture.name))
    left = [
        f"part {number}: {step}"
        for number, steps in enumerate(PARTS, 1)
        for step in steps
        if number not in found or not found[number].has(step)
    ]
    said = f"Results: {path}, and the figures with goals in {into / 'RESULTS.md'}. To send them in: docs/gpu-day.md."
    return f"Not done well: {'; '.join(left)}. The same command continues.\n{said}" if left else f"All steps are done. {said}"


def _document_path(into: Path, parts: Mapping[int, Part]) -> Path:
    """Return where the document of these parts is: one for each day, device and commit."""
    first = min(parts.values(), key=lambda part: part.date)
    device = re.sub(r"[^a-z0-9]+", "-", first.device.lower()).strip("-")
    return into / "results" / ("-".join([first.date, "gpu-day", device, *([first.commit] if first.commit else [])]) + ".md")


def document(parts: Mapping[int, Part]) -> str:
    """Return the day's document: what contradicts its prediction, how each step ended, and every row."""
    tables = [(number, name, done, _table(part, done)) for number, part in parts.items() for name, done in part.steps.items()]
    rows = [row for *_, text in tables for row in _rows(text)]
    holds = [row["holds"] for row in rows]
    counts = {
        "rows": len(rows),
        "hold": holds.count("holds"),
        "contradict their prediction": sum(text.startswith("contradicts") for text in holds),
        "have no prediction": holds.count(""),
        "were not measured": sum(row["measured"] in (ERROR, MISSING, NOT_REACHED, OUT_OF_MEMORY) for row in rows),
    }
    machines = sorted({f"{part.device}, commit {part.commit or 'unknown'}" for part in parts.values()})
    lines = [
        f"# A day on a GPU, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`make gpu-day` on {'; '.join(machines)}. " + ", ".join(f"{number} {text}" for text, number in counts.items()) + ".",
        "A measurement holds within 5 % of its prediction's ends (`benchmarks/gpu/predictions.py`).",
        "",
        "## What contradicts its prediction",
        "",
        *_contradictions(rows),
        "",
        "## Steps",
        "",
        "| part | step | ended | seconds |",
        "| --- | --- | --- | ---: |",
    ]
    for number, name, done, _text in tables:
        ended = {0: "well", None: "by its time limit"}.get(done.status, f"exit status {done.status}")
        lines.append(f"| {number} | {name} | {ended} | {done.seconds:.0f} |")
    for *_, text in tables:
        lines += ["", re.sub(r"^#", "##", text.strip(), flags=re.MULTILINE)] if text else []
    return "\n".join(lines) + "\n"


def _table(part: Part, done: Done) -> str:
    path = part.folder / (done.table or "")
    return path.read_text("utf-8") if done.table and path.exists() else ""


def _contradictions(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    against = [row for row in rows if row["holds"].startswith("contradicts")]
    if not against:
        yield "Nothing."
        return
    columns = ("figure", "measured", "ratio", "predicted", "holds")
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    yield from (f"| {' | '.join(row[column] for column in columns)} |" for row in against)


def _rows(text: str) -> Iterator[dict[str, str]]:
    """Read the rows of a benchmark's table by column."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        if line.startswith("|") and len(cells) == len(BESIDE_PREDICTIONS) and cells[0] not in (BESIDE_PREDICTIONS[0], "---"):
            yield dict(zip(BESIDE_PREDICTIONS, cells, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
