"""Run a benchmark: its options, its sections within their time budgets, and the resulting table.

A section is a list of cases, and each case makes rows. If a case raises, its row has the error, the run continues and the
exit status is 1. If no time is left for a case, or the device has too little memory for it, its row says so.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import torch

from benchmarks.figures import OUT, add_write_option, command_line, write
from benchmarks.gpu.predictions import Predictions
from benchmarks.gpu.report import (
    ERROR,
    MISSING,
    NOT_REACHED,
    OUT_OF_MEMORY,
    Report,
    Row,
    describe_machine,
    first_line,
    missing_packages,
    unused,
)
from benchmarks.gpu.timing import Timer, Timing

COPY_BYTES = 1 << 32
GEMM_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second of a copy (read plus written), and bf16 floating-point operations per second, on random data."""

    copy_bytes_per_s: float
    gemm_flops_per_s: float

    def share_of_copy(self, num_bytes: float, timing: Timing) -> float:
        """Return the bandwidth of work that must move `num_bytes`, as a share of the copy's bandwidth."""
        return num_bytes / timing.median_s / self.copy_bytes_per_s

    def __str__(self) -> str:
        return f"copy {self.copy_bytes_per_s / 1e12:.3g} TB/s, bf16 GEMM {self.gemm_flops_per_s / 1e12:.3g} TFLOP/s"


def measure_ceilings(timer: Timer, *, smoke: bool) -> Ceilings:
    """Measure both rates on random data. smoke: use a size that takes almost no time."""
    num_bytes, size = (1 << 16, 64) if smoke else (COPY_BYTES, GEMM_SIZE)
    return Ceilings(_copy_bytes_per_s(timer, num_bytes), _gemm_flops_per_s(timer, size))


def _copy_bytes_per_s(timer: Timer, num_bytes: int) -> float:
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / timer.measure(lambda _: target.copy_(source)).median_s


def _gemm_flops_per_s(timer: Timer, size: int) -> float:
    pairs = [torch.randn(2, size, size, device=timer.device).bfloat16().unbind() for _ in range(3)]
    return 2 * size**3 / timer.measure(lambda number: torch.mm(*pairs[number]), num_sets=len(pairs)).median_s


DEFAULT_BUDGET_S = 440.0
"""For a run that has to end within eight minutes, including Python's start and a last case that overruns."""

COMPARISON_S = 20.0
"""Limit for a case that only compares, or draws."""


class OutOfTime(BaseException):
    """Raised inside a case whose time is up. It is no Exception, so that code that tries alternatives does not catch it."""


@dataclass(frozen=True)
class Case:
    """A function that makes some rows. expected_s: the case does not start with less time left; 0: it always runs.

    A case of 0 seconds compares what others have measured, however far they came.
    """

    name: str
    run: Callable[[], Iterable[Row]]
    expected_s: float = 2.0


@dataclass(frozen=True)
class Section:
    """A named list of cases. share: part of the time budget; the next section may use what is left over."""

    name: str
    cases: list[Case]
    share: float


@dataclass
class Session:
    """The objects that all cases share: the options, the device, its timer and its ceilings."""

    options: argparse.Namespace
    device: torch.device
    timer: Timer
    ceilings: Ceilings
    ends_at: float = field(default=0.0)

    @property
    def smoke(self) -> bool:
        return self.options.smoke

    @property
    def left_s(self) -> float:
        """Seconds that the present section has left."""
        return self.ends_at - time.monotonic()


def parser(description: str | None) -> argparse.ArgumentParser:
    """Build the argument parser with the options of all benchmarks."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=OUT, help="folder for the table")
    add_write_option(arguments)
    arguments.add_argument("--budget-s", type=float, default=DEFAULT_BUDGET_S, help="seconds for all sections together")
    arguments.add_argument("--sections", default="", help="beginnings of section names, separated by commas; default: all")
    arguments.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, or cpu with --smoke")
    arguments.add_argument("--smoke", action="store_true", help="use tiny sizes, only to check that everything runs")
    return arguments


def run(name: str, title: str, options: argparse.Namespace, sections: Callable[[Session, Report], list[Section]]) -> int:
    """Run the sections and write the table. Returns 1 if anything raised."""
    began = time.monotonic()
    device = torch.device(options.device or ("cpu" if options.smoke else "cuda"))
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    timer = Timer(device, repeats=2, warmup=1) if options.smoke else Timer(device)
    session = Session(options, device, timer, measure_ceilings(timer, smoke=options.smoke))
    kind = "-smoke" if options.smoke else ""
    path = unused(options.out / f"{datetime.now(UTC):%Y-%m-%d}-gpu-{name}{kind}.md")
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    report = Report(title, path, _header(name, session), predictions=Predictions.of(machine))
    try:
        _run_sections(_chosen(sections(session, report), options.sections), session, report, began)
    finally:  # a run that is interrupted keeps its figures, too
        if options.write and not session.smoke:
            command = command_line(f"benchmarks.gpu.{name}", sys.argv[1:])
            write(options.write, report.results(f"GPU, {name}"), command, machine, is_timed=False)
    missing = ", ".join(missing_packages())
    report.closing += [f"Not installed: {missing}.", ""] if missing else []
    report.closing += [f"The run took {time.monotonic() - began:.0f} s of its {options.budget_s:.0f} s budget."]
    report.write()
    sys.stdout.write(str(report))
    return int(bool(report.rows(ERROR)))


def _header(name: str, session: Session) -> list[str]:
    smoke = ["Smoke run: tiny sizes, whatever the figures are called. It only shows that everything runs.", ""]
    return [
        *(smoke if session.smoke else []),
        f"`{command_line(f'benchmarks.gpu.{name}', sys.argv[1:])}`",
        "",
        describe_machine(session.device),
        f"Ceilings, measured in this run: {session.ceilings}. Times are medians of device events, ± the distance "
        "between quartiles; all data is random. "
        "Predictions are those of `benchmarks/PREDICTIONS.md` for this device.",
    ]


def missing(figure: str, package: str) -> Row:
    """Build the row of a peer whose package cannot be imported."""
    return Row(figure, MISSING, note=f"{package} is not installed here")


def _chosen(sections: list[Section], beginnings: str) -> list[Section]:
    names = chosen_names("--sections", beginnings, [section.name for section in sections])
    return [section for section in sections if section.name in names]


def chosen_names(option: str, beginnings: str, names: Sequence[str]) -> list[str]:
    """Return the names that begin with one of the beginnings, or all. Ends the run for one that no name begins with."""
    wanted = tuple(word.strip().lower() for word in beginnings.split(",") if word.strip())
    if not all(any(name.lower().startswith(word) for name in names) for word in wanted):
        raise SystemExit(f"{option} is {beginnings!r}; allowed: beginnings of {', '.join(names)}.")
    return [name for name in names if not wanted or name.lower().startswith(wanted)]


def _run_sections(chosen: list[Section], session: Session, report: Report, began: float) -> None:
    """Run sections one after the other; each may use its share of the seconds that are left."""
    for number, section in enumerate(chosen):
        shares = sum(later.share for later in chosen[number:])
        left_s = session.options.budget_s - (time.monotonic() - began)
        _run_section(section, session, report, max(0.0, left_s) * section.share / shares)


def _run_section(section: Section, session: Session, report: Report, budget_s: float) -> None:
    session.ends_at = time.monotonic() + budget_s
    for case in section.cases:
        left_s = session.left_s
        if case.expected_s and (left_s <= 0 or (left_s < case.expected_s and not session.smoke)):
            report.add(section.name, Row(case.name, NOT_REACHED, note=f"{max(0.0, left_s):.0f} s were left"))
            continue
        session.timer.release()  # what measured the ceilings, or the case before, would count in the peak of this one
        sys.stderr.write(f"{section.name}: {case.name}; {_allocated_gib(session.device):.1f} GiB are allocated\n")
        try:
            with _at_most(left_s if case.expected_s else COMPARISON_S):
                for row in case.run():
                    report.add(section.name, row)
        except OutOfTime:
            report.add(section.name, Row(case.name, NOT_REACHED, note=f"stopped after {left_s:.0f} s"))
        except torch.OutOfMemoryError as error:
            report.add(section.name, Row(case.name, OUT_OF_MEMORY, note=first_line(error)))
        except Exception as error:  # noqa: BLE001  the remaining cases shall still run
            report.add(section.name, Row(case.name, ERROR, note=first_line(error)))


def _allocated_gib(device: torch.device) -> float:
    """Return the allocated GiB. Before a case it should be near zero: leftovers of a case add to the next case's peak."""
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the body if it takes longer."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
