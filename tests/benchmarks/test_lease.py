"""The plan of half an hour on a GPU machine: each case of each section is given the time that it is expected to need."""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import accuracy, lease, session
from benchmarks.gpu.report import Report
from benchmarks.gpu.session import Ceilings, Section, Session
from benchmarks.gpu.timing import Timer

START_OF_THE_MACHINE_S = 60.0
HALF_AN_HOUR_S = 1800.0
LEFT_OUT = {"Gradients in FP8", "Speedup by shape", "Other levels"}
"""Sections without a target."""

Plan = list[tuple[Section, float]]


def sections_of(run: lease.Run, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, set[str]]:
    """Parse a command line as its benchmark does. Returns the chosen sections with their seconds, and all sections' names."""
    found: Plan = []
    names: set[str] = set()

    def plan(_name: str, _title: str, options: argparse.Namespace, sections: Callable[[Session, Report], list[Section]]) -> int:
        device = torch.device("cpu")
        every = sections(Session(options, device, Timer(device), Ceilings(1.0, 1.0)), Report("", Path(), []))
        names.update(section.name for section in every)
        chosen = session._chosen(every, options.sections)
        shares = sum(section.share for section in chosen)
        found.extend((section, options.budget_s * section.share / shares) for section in chosen)
        return 0

    module = importlib.import_module(f"benchmarks.gpu.{run.name}")
    monkeypatch.setattr(module, "run", plan)
    monkeypatch.setattr(sys, "argv", run.command(Path("out"))[2:])
    assert module.main() == 0
    return found, names


@pytest.fixture(autouse=True)
def without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "load_source_text", lambda _length: None)
    monkeypatch.setattr(accuracy, "_said", lambda *_setting: "")


def test_each_case_has_the_time_that_it_needs_and_each_figure_with_a_target_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, known = set(), set()
    for run in (run for call in lease.CALLS for run in call if run.name != lease.TESTS):
        plan, names = sections_of(run, monkeypatch)
        for section, budget_s in plan:
            expected_s = sum(case.expected_s for case in section.cases)
            assert section.cases, f"{section.name} has no case"
            assert expected_s <= budget_s, f"{run}: {section.name} needs {expected_s:.0f} s and has {budget_s:.0f} s"
            reached.add(section.name)
        known |= names
    assert reached == known - LEFT_OUT


def test_calls_are_within_ten_minutes_and_the_three_within_half_an_hour() -> None:
    needed_s = [sum(run.budget_s + lease.START_S for run in call) for call in lease.CALLS]
    assert max(needed_s) <= lease.CALL_S - lease.GRACE_S
    assert sum(needed_s) + START_OF_THE_MACHINE_S <= HALF_AN_HOUR_S


@pytest.mark.parametrize(
    ("name", "too_late"),
    [("train", {"GPT step", "CUDA graphs", "Job", "Memory with options", "Memory of vision models", "Other levels"})],
)
def test_a_run_of_the_default_time_starts_the_first_cases_of_each_section(
    name: str, too_late: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of `too_late` have cases that wait for another run."""
    plan, _ = sections_of(lease.Run(name, "", session.DEFAULT_BUDGET_S), monkeypatch)
    for section, budget_s in plan:
        needs = [case.expected_s for case in section.cases]
        assert needs[0] <= budget_s
        assert (sum(needs) <= budget_s) is (section.name not in too_late)


def call_of(scripts: list[str], monkeypatch: pytest.MonkeyPatch, out: Path, call_s: float = lease.CALL_S) -> int:
    """Run a call of parts that are scripts of Python."""
    left = iter(scripts)
    monkeypatch.setattr(lease.Run, "command", lambda _run, _out: [sys.executable, "-c", next(left)])
    monkeypatch.setattr(lease, "CALLS", (tuple(lease.Run(f"part{number}", "", 1) for number in range(len(scripts))),))
    monkeypatch.setattr(lease, "CALL_S", call_s)
    monkeypatch.setattr(sys, "argv", ["lease", "1", "--out", str(out)])
    return lease.main()


def test_a_call_runs_each_of_its_parts_and_says_if_one_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = [f"print('a' * 5000 + '{number}'); raise SystemExit({3 * (number == 0)})" for number in range(3)]
    assert call_of(scripts, monkeypatch, tmp_path) == 1
    shown = capsys.readouterr().out
    heads = [line.partition(";")[0] for line in shown.splitlines() if line.startswith("==")]
    assert heads == [f"== part{number}: exit status {status}" for number, status in enumerate((3, 0, 0))]
    assert len(shown) < 3 * (lease.SHOWN + 100)
    assert all("a" * 1000 + str(number) in shown for number in range(3))
    assert (tmp_path / "lease-1.log").read_text().count("a" * 5000) == 3
    assert call_of(scripts[1:], monkeypatch, tmp_path) == 0


@pytest.mark.system
def test_a_part_that_hangs_is_ended_and_leaves_the_others_their_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first prints its results when it is interrupted, the second ignores it; each ends with the processes it started."""
    hangs = "import subprocess, sys, time; print('so far', flush=True); subprocess.run([sys.executable, '-c', '{}'])"
    interrupted = hangs.format("import time; time.sleep(600)")
    deaf = hangs.format("import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)")
    monkeypatch.setattr(lease, "GRACE_S", 5.0)
    monkeypatch.setattr(lease, "START_S", 6.0)
    assert (
        call_of(
            [interrupted, f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {deaf}", "print('last')"],
            monkeypatch,
            tmp_path,
            29.0,
        )
        == 1
    )
    shown = capsys.readouterr().out
    assert shown.count("which it had") == 2
    assert shown.count("so far") == 2
    assert "KeyboardInterrupt" in shown
    assert "== part2: exit status 0" in shown
    assert "last" in shown


def test_what_the_calls_print_and_bring_back_is_within_the_tool_s_limits() -> None:
    """12,000 characters, and 8 files: the log of the call, a table for each benchmark, and a second file of some."""
    for call in lease.CALLS:
        assert len(call) * (lease.SHOWN + 200) <= 12_000
        assert 1 + sum(2 if run.name == "accuracy" else 1 for run in call) <= 8
