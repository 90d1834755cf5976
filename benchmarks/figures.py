"""Keep the current figures in RESULTS.md: one row for each figure, replaced whenever a benchmark measures it again.

    python -m benchmarks.figures OUT/RESULTS.md

takes over the rows that a benchmark has written on another machine, which may have no git.
"""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
PREDICTIONS = RESULTS.with_name("PREDICTIONS.md")
"""Every figure that is predicted for a GPU, with and without a goal. `make gpu-day` reads it."""
OUT = RESULTS.parent.parent / "build/benchmarks"
"""The default folder for detailed tables. Git ignores it; a table that RESULTS.md cites is copied to `results/`."""

MAX_LOAD_PER_CORE = 1.5
"""A benchmark of two processes on two cores is itself a load of one per core."""

FOLDERS = ("--out", "--runs", "--folder", "--write")


@dataclass(frozen=True)
class Figure:
    """One row. name: unique, with its unit; the table is sorted by it. Empty columns are filled in by `write`."""

    figure: str
    value: str
    interval: str = ""
    goal: str = ""
    date: str = ""
    commit: str = ""
    machine: str = ""
    command: str = ""

    def line(self) -> str:
        """Return the row in Markdown."""
        cells = (" ".join(str(cell).replace("|", "¦").split()) for cell in asdict(self).values())
        return f"| {' | '.join(cells)} |"


COLUMNS = [field.name for field in fields(Figure)]


def add_write_option(parser: argparse.ArgumentParser) -> None:
    """Add --write, which names RESULTS.md unless another file follows it."""
    text = "replace the figures' rows in this file (default: benchmarks/RESULTS.md)"
    parser.add_argument("--write", type=Path, nargs="?", const=RESULTS, help=text)


def command_line(module: str, words: Sequence[str]) -> str:
    """Return the command that repeats a run, without folders, which are specific to a machine."""
    kept: list[str] = []
    skips = False
    for word in words:
        names_folder = word.split("=")[0] in FOLDERS
        if not names_folder and not (skips and not word.startswith("--")):
            kept.append(word)
        skips = names_folder and "=" not in word
    return " ".join([f"python -m {module}", *kept])


def show(figures: Sequence[Figure], module: str, path: Path | None) -> None:
    """Print the rows of a timed benchmark, and write them into a file if one is named."""
    sys.stdout.write("".join(f"{figure.line()}\n" for figure in figures))
    if path is not None:
        write(path, figures, command_line(module, sys.argv[1:]))


def write(path: Path, figures: Iterable[Figure], command: str, machine: str = "", *, is_timed: bool = True) -> None:
    """Replace the rows of these figures in a file and keep the others.

    is_timed: the figures are times or rates, which a loaded machine distorts: there the run ends without writing.
    """
    num_cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if is_timed and load > MAX_LOAD_PER_CORE * num_cores:
        raise SystemExit(
            f"--write: the load average is {load:.1f} on {num_cores} cores; allowed: {MAX_LOAD_PER_CORE * num_cores:g}. "
            "Measure again on a quiet machine."
        )
    described = machine or f"{platform.machine()}, {num_cores} cores" + (f", load {load:.1f}" if is_timed else "")
    made = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit(), "machine": described, "command": f"`{command}`"}
    save(path, [replace(figure, **made) for figure in figures])


def save(path: Path, figures: Iterable[Figure]) -> None:
    """Replace complete rows in a file and keep the others. A new file has the table alone."""
    before, rows, after = read(path)
    rows |= {figure.figure: figure for figure in figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join([before, *(f"{rows[name].line()}\n" for name in sorted(rows)), after]))


def read(path: Path) -> tuple[str, dict[str, Figure], str]:
    """Return the text before the rows with the table's head, the rows by figure, and the text after them."""
    head = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n"
    before, found, rest = path.read_text().partition(head) if path.exists() else ("", "", "")
    if path.exists() and not found:
        raise ValueError(f"{path.name} has no table with the columns {', '.join(COLUMNS)}. Restore its head from git.")
    lines = rest.splitlines(keepends=True)
    num_rows = next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))
    rows = [Figure(*(cell.strip() for cell in line.strip().strip("|").split(" | "))) for line in lines[:num_rows]]
    return before + head, {row.figure: row for row in rows}, "".join(lines[num_rows:])


def commit() -> str:
    """Return the checkout's commit, with "+" where other files than results differ from it; "" where there is no git."""
    folder = RESULTS.parent.name
    results = [f":!{folder}/{name}" for name in (RESULTS.name, PREDICTIONS.name, "results")]
    try:
        name = _git("describe", "--always", "--abbrev=7", "--exclude=*")
        return name + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", ".", *results) else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*words: str) -> str:
    command = ["git", "-C", str(RESULTS.parent.parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Take over the rows of other files. Rows without a commit get this checkout's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    for file in options.files:
        _, rows, _ = read(file)
        save(options.into, [row if row.commit else replace(row, commit=commit()) for row in rows.values()])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
