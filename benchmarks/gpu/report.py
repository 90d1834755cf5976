"""The dated table of a run, in Markdown. It is written after every row, so that a later crash loses no measurement."""

import itertools
import platform
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.figures import Figure
from benchmarks.gpu.predictions import Predictions

COLUMNS = ("figure", "measured", "compared with, in the same run", "ratio", "ship", "ahead", "met", "note")
BESIDE_PREDICTIONS = (*COLUMNS, "predicted", "holds")
"""Columns of a table whose rows stand beside what was predicted for this device."""
PACKAGES = ("triton", "torchao", "transformers", "bitsandbytes")
NOT_REACHED, ERROR, MISSING, OUT_OF_MEMORY = "not reached", "error", "missing", "out of memory"


@dataclass(frozen=True)
class Target:
    """Two ratios: at `ship` a figure is good enough to release, at `ahead` it is better than the alternatives."""

    ship: float
    ahead: float
    lower_is_better: bool = False
    style: str = ".2f"

    def goal(self) -> str:
        """Return both limits in words."""
        sign = "<=" if self.lower_is_better else ">="
        return f"{sign} {self.ship:{self.style}}, ahead {sign} {self.ahead:{self.style}}"

    def met(self, ratio: float) -> str:
        """Return the name of the better target that a ratio meets, or "no"."""
        for name, limit in (("ahead", self.ahead), ("ship", self.ship)):
            if ratio <= limit if self.lower_is_better else ratio >= limit:
                return name
        return "no"


@dataclass(frozen=True)
class Row:
    """One line: a measurement, the reference that it is compared with, and the ratio of the two, which the target limits."""

    figure: str
    measured: str
    reference: str = ""
    ratio: float | None = None
    target: Target | None = None
    note: str = ""
    style: str = ".2f"

    def result(self, area: str) -> Figure:
        """Return the row of RESULTS.md: the ratio to the reference, with the measurement and the goals."""
        style = self.target.style if self.target else self.style
        peer = re.split(r":? ?\b\d", self.reference)[0] or self.reference
        name = f"{area}: {self.figure} / {peer}" if peer else f"{area}: {self.figure}"
        value = self.measured if self.ratio is None else f"{self.ratio:{style}} ({self.measured})"
        return Figure(name, value, goal=self.target.goal() if self.target else "")

    def cells(self) -> tuple[str, ...]:
        """Return one cell for each of COLUMNS."""
        style = self.target.style if self.target else self.style
        ratio = "" if self.ratio is None else format(self.ratio, style)
        limits, met = ("", ""), ""
        if self.target is not None:
            limits = (format(self.target.ship, style), format(self.target.ahead, style))
            met = "" if self.ratio is None else self.target.met(self.ratio)
        cells = (self.figure, self.measured, self.reference, ratio, *limits, met, self.note)
        return tuple(" ".join(cell.replace("|", "¦").split()) for cell in cells)


def unused(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, … if there is such a file: a run overwrites no other run's table."""
    names = (path if number == 1 else path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


@dataclass
class Report:
    """Sections of rows below a header. path: the file, which every `write` replaces; see `unused`.

    predictions: adds two columns; None for a table that is itself predicted.
    """

    title: str
    path: Path
    header: list[str]
    sections: dict[str, list[Row]] = field(default_factory=dict)
    closing: list[str] = field(default_factory=list)
    predictions: Predictions | None = None

    def add(self, section: str, row: Row) -> None:
        self.sections.setdefault(section, []).append(row)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(str(self))

    def rows(self, measured: str | None = None) -> list[Row]:
        """Return all rows, or those with the given text in `measured`."""
        return [row for rows in self.sections.values() for row in rows if measured in (None, row.measured)]

    def results(self, area: str) -> list[Figure]:
        """Return the rows with a goal that were measured."""
        return [row.result(area) for row in self.rows() if row.target is not None and row.ratio is not None]

    def _cells(self, row: Row) -> tuple[str, ...]:
        if self.predictions is None:
            return row.cells()
        figure = row.result("GPU")
        prediction = self.predictions.find(figure.figure)
        beside = ("", "") if prediction is None else (str(prediction), prediction.verdict(figure.value))
        return (*row.cells(), *beside)

    def __str__(self) -> str:
        lines = [f"# {self.title}, {datetime.now(UTC):%Y-%m-%d}", "", *self.header]
        columns = COLUMNS if self.predictions is None else BESIDE_PREDICTIONS
        for section, rows in self.sections.items():
            lines += ["", f"## {section}", "", f"| {' | '.join(columns)} |", "| " + " | ".join(["---"] * len(columns)) + " |"]
            lines += [f"| {' | '.join(self._cells(row))} |" for row in rows]
        return "\n".join([*lines, *(["", *self.closing] if self.closing else [])]) + "\n"


def describe_machine(device: torch.device) -> str:
    """Describe the device, and the versions that `describe_versions` lists, in one line."""
    name = "CPU"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.1f} GiB, "
            f"CUDA {torch.version.cuda}"
        )
    return f"{name}; {describe_versions()}."


def describe_versions() -> str:
    """List the versions of torch, of the packages compared with, and of Python."""
    versions = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    return f"torch {torch.__version__}, {versions}, Python {platform.python_version()}"


def missing_packages() -> list[str]:
    """Return the names in PACKAGES that are not installed."""
    return [package for package in PACKAGES if _version(package) == MISSING]


def first_line(error: BaseException) -> str:
    """Return an error's first line, without folders of this machine."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    without_folders = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)
    return f"{type(error).__name__}: {without_folders}"[:240]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING
