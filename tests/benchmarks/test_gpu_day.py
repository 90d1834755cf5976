"""A day on a GPU: each case has the time that it needs, what was stopped goes on, and rows stand beside their predictions."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import figures
from benchmarks.gpu import accuracy, day, predicted_largest, predicted_speed, predictions, session, train
from benchmarks.gpu.predictions import Predictions
from benchmarks.gpu.report import BESIDE_PREDICTIONS, Report, Row
from benchmarks.gpu.session import Ceilings, Section, Session
from benchmarks.gpu.timing import Timer

ROOT = Path(__file__).parents[2]
START_OF_THE_MACHINE_S = 60.0
HALF_AN_HOUR_S = 1800.0
LEFT_OUT = {"Gradients in FP8", "Speedup by shape", "Other levels"}
"""Sections without a target."""

Plan = list[tuple[Section, float]]


def sections_of(run: day.Step, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, set[str]]:
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
    for run in (step for part in day.PARTS for step in part if step.name != day.TESTS):
        plan, names = sections_of(run, monkeypatch)
        for section, budget_s in plan:
            expected_s = sum(case.expected_s for case in section.cases)
            assert section.cases, f"{section.name} has no case"
            assert expected_s <= budget_s, f"{run}: {section.name} needs {expected_s:.0f} s and has {budget_s:.0f} s"
            reached.add(section.name)
        known |= names
    assert reached == known - LEFT_OUT


def test_parts_are_within_ten_minutes_and_the_three_within_half_an_hour() -> None:
    needed_s = [sum(step.budget_s + day.START_S for step in part) for part in day.PARTS]
    assert max(needed_s) <= day.PART_S - day.GRACE_S
    assert sum(needed_s) + START_OF_THE_MACHINE_S <= HALF_AN_HOUR_S


@pytest.mark.parametrize(
    ("name", "too_late"),
    [("train", {"GPT step", "CUDA graphs", "Job", "Memory with options", "Memory of vision models", "Other levels"})],
)
def test_a_run_of_the_default_time_starts_the_first_cases_of_each_section(
    name: str, too_late: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of `too_late` have cases that wait for another run."""
    plan, _ = sections_of(day.Step(name, "", session.DEFAULT_BUDGET_S), monkeypatch)
    for section, budget_s in plan:
        needs = [case.expected_s for case in section.cases]
        assert needs[0] <= budget_s
        assert (sum(needs) <= budget_s) is (section.name not in too_late)


DEVICE = "NVIDIA H100 80GB HBM3"


class Scripts:
    """A day of one part, whose steps are scripts of Python. out, into: its folders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.out, self.into = monkeypatch, folder / "out", folder / "into"
        self.device = DEVICE
        monkeypatch.setattr(day, "probe", lambda: self.device)
        monkeypatch.setattr(figures, "commit", lambda: "abc1234")

    def run(self, *scripts: str, part_s: float = day.PART_S) -> int:
        by_name = {f"step{number}": script for number, script in enumerate(scripts)}
        folder = self.out / "part-1"
        self.monkeypatch.setattr(
            day.Step, "command", lambda step, _out: [sys.executable, "-c", by_name[step.name].replace("FOLDER", str(folder))]
        )
        self.monkeypatch.setattr(day, "PARTS", (tuple(day.Step(name, "", 1) for name in by_name),))
        self.monkeypatch.setattr(day, "PART_S", part_s)
        return day.main(["--out", str(self.out), "--into", str(self.into)])

    @property
    def document(self) -> str:
        (path,) = (self.into / "results").glob("*-gpu-day-nvidia-h100-80gb-hbm3-abc1234.md")
        return path.read_text("utf-8")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scripts:
    return Scripts(monkeypatch, tmp_path)


def heads(shown: str) -> list[str]:
    return [line.partition(";")[0] for line in shown.splitlines() if line.startswith("== ")]


def test_steps_that_ended_well_are_not_run_again(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    noisy = "print('a' * 5000 + '{}'); raise SystemExit({})"
    assert scripts.run(noisy.format(0, 3), noisy.format(1, 0)) == 1
    shown = capsys.readouterr().out
    assert heads(shown) == ["== step0: exit status 3", "== step1: exit status 0"]
    assert "Not done well: part 1: step0. The same command continues." in shown
    assert len(shown) < 2 * (day.SHOWN + 100) + 700
    assert (scripts.out / "part-1/log.txt").read_text().count("a" * 5000) == 2
    assert scripts.run(noisy.format(0, 0), noisy.format(1, 7)) == 0
    shown = capsys.readouterr().out
    assert heads(shown) == ["== step0: exit status 0"]
    assert "1 steps are done" in shown
    assert "All steps are done." in shown
    assert "| 1 | step0 | well |" in scripts.document


def test_another_device_begins_again(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts.run("pass") == 0
    scripts.device = "NVIDIA H200"
    assert scripts.run("pass") == 0
    assert heads(capsys.readouterr().out) == ["== step0: exit status 0"] * 2


TABLE_SCRIPT = """
from pathlib import Path
from benchmarks.gpu.predictions import Predictions
from benchmarks.gpu.report import Report, Row, Target
from benchmarks import figures
report = Report("Steps", Path("FOLDER/2026-01-01-gpu-train.md"), ["Made."], predictions=Predictions.of("NVIDIA H100 80GB HBM3"))
report.add("GPT step", Row("GPT 1.3 B, O2: speed", "106 ms", "bf16-amp 131 ms", 1.23, Target(1.2, 1.3)))
report.add("GPT step", Row("GPT 6.7 B, O2: speed", "300 ms", "bf16-amp 330 ms", 1.10, Target(1.3, 1.45)))
report.add("GPT step", Row("a new figure", "1 ms"))
figures.save(Path("FOLDER/RESULTS.md"), report.results("GPU, train"))
"""


@pytest.mark.system
def test_the_document_begins_with_what_contradicts_its_prediction(scripts: Scripts) -> None:
    assert scripts.run(TABLE_SCRIPT) == 0
    text = scripts.document
    assert "3 rows, 1 hold, 1 contradict their prediction, 1 have no prediction, 0 were not measured." in text
    contradictions = text[text.index("## What contradicts") : text.index("## Steps")]
    assert "| GPT 6.7 B, O2: speed | 300 ms | 1.10 | 1.46 (229.4 ms), 1.39 to 1.57 | contradicts: -21% |" in contradictions
    assert "1.3 B" not in contradictions
    assert "### GPT step" in text
    _, rows, _ = figures.read(scripts.into / "RESULTS.md")
    row = rows["GPU, train: GPT 1.3 B, O2: speed / bf16-amp"]
    assert (row.value, row.commit) == ("1.23 (106 ms)", "abc1234")


@pytest.mark.system
def test_parts_of_several_machines_are_collected(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts.run(TABLE_SCRIPT) == 0
    scripts.monkeypatch.setattr(day, "probe", lambda: pytest.fail("nothing is run"))
    copied = scripts.into.with_name("copied")
    assert day.main(["--collect", "--out", str(scripts.out), "--into", str(copied)]) == 0
    assert [path.name for path in (copied / "results").iterdir()] == [
        path.name for path in (scripts.into / "results").iterdir()
    ]
    assert day.main(["--collect", "--out", str(copied), "--into", str(copied)]) == 0
    assert "has no part; run make gpu-day." in capsys.readouterr().out


@pytest.mark.system
def test_a_step_that_hangs_is_ended_and_leaves_the_others_their_time(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first prints its results when it is interrupted, the second ignores it; each ends with the processes it started."""
    hangs = "import subprocess, sys, time; print('so far', flush=True); subprocess.run([sys.executable, '-c', '{}'])"
    interrupted = hangs.format("import time; time.sleep(600)")
    deaf = hangs.format("import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)")
    deaf = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {deaf}"
    monkeypatch.setattr(day, "GRACE_S", 5.0)
    monkeypatch.setattr(day, "START_S", 6.0)
    assert scripts.run(interrupted, deaf, "print('last')", part_s=29.0) == 1
    shown = capsys.readouterr().out
    assert shown.count("which it had") == 2
    assert shown.count("so far") == 2
    assert "KeyboardInterrupt" in shown
    assert "== step2: exit status 0" in shown
    assert "last" in shown
    assert scripts.document.count("| by its time limit |") == 2


@pytest.mark.system
def test_a_machine_without_a_gpu_is_refused_with_the_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.day", "--out", str(tmp_path), "--into", str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 1
    assert "sees no CUDA device. It needs an NVIDIA GPU" in done.stderr
    assert "GPU_PYTHON=/path/to/python3" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("capability", "is_refused"), [([8, 6], True), ([8, 9], False), ([9, 0], False), ([12, 0], False)])
def test_a_gpu_without_fp8_products_is_refused(
    capability: list[int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(day, "PROBE", f"print({json.dumps(json.dumps(['A card', capability]))})")
    if is_refused:
        with pytest.raises(SystemExit, match=r"A card has compute capability 8\.6; allowed: 8\.9 or later"):
            day.probe()
    else:
        assert day.probe() == "A card"


def test_what_a_part_prints_and_leaves_is_within_the_limits_of_a_lent_machine() -> None:
    """12,000 characters, and 8 files: the log, part.json, RESULTS.md, a table for each benchmark, and the curves."""
    for part in day.PARTS:
        assert len(part) * (day.SHOWN + 200) <= 12_000
        assert 3 + sum({"tests": 0, "accuracy": 2}.get(step.name, 1) for step in part) <= 8


def test_predictions_are_of_the_devices_that_are_predicted() -> None:
    assert set(predictions.DEVICES) == set(predicted_speed.DEVICES)
    assert set(predictions.DEVICES.values()) == set(predicted_largest.CARDS)


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_measured_rows_find_their_predictions(device: str) -> None:
    """One name of each kind, as the benchmarks make it."""
    found = Predictions.of(device)
    options = train.WITH_OPTIONS[0].name
    rows = [
        *(Row(f"GPT {size.name}, O2: speed", "1 ms", "bf16-amp 1", 1.2, size.speed) for size in train.SIZES),
        *(Row(f"GPT {size.name}, O2: peak memory", "1 GiB", "bf16-amp 2 GiB", 0.5) for size in train.SIZES),
        Row("GPT 1.3 B, bf16-amp: speed", "60,000 tokens/s, step 1 ms"),
        Row("GPT 1.3 B, bf16-amp: peak memory", "31 GiB"),
        Row("GPT 1.3 B, O2: peak memory", "17 GiB", "fp16-amp 31 GiB", 0.55),
        Row(f"GPT 1.3 B, {options}: peak memory", "12 GiB", "bf16-amp 31 GiB", 0.4),
        Row("GPT 1.3 B, O2, CUDA graphs: speed", "1", "bf16-amp, CUDA graphs 1", 1.2),
        Row("GPT 6.7 B, O2: model TFLOP/s", "1 ms", train.IN_TFLOPS, 700, train.FLOPS),
        Row("largest GPT of hidden size 4096 that trains, O2", "12 B", "bf16-amp at most 5 B", 2.5),
        Row("Swin-1.0B at batch 16, O2: peak memory saved", "1 GiB", "fp16-amp 2 GiB", 0.4, style=".0%"),
        Row("quantize row, 16384×4096", "60 µs", "copy 2.9 TB/s", 0.9),
        Row("AdamW O2 against torch AdamW, fused, fp32", "4 ms", "theirs 9 ms", 2.4),
        Row("linear 8192×4096×4096, tensor", "1 ms", "bf16 1 ms", 1.2),
        Row(accuracy.TO_LOSS, "26 s", "bf16-amp 28 s", 1.05),
    ]
    without = [row.figure for row in rows if found.find(row.result("GPU, train").figure) is None]
    assert without == [], "run make bench-predicted-memory and bench-predicted-speed with --write"


def test_a_measurement_contradicts_a_prediction_beyond_its_ends() -> None:
    prediction = predictions.Prediction("1.26, 1.20 to 1.33", 1.20, 1.33)
    verdicts = [prediction.verdict(text) for text in ("1.15 (99 ms)", "1.39", "1.10 (1 ms)", "1.47", "not reached")]
    assert verdicts == ["holds", "holds", "contradicts: -8%", "contradicts: +11%", ""]
    assert predictions.number("62,466 tokens/s, step 131.1 ms") == 62_466


def test_a_table_beside_predictions_has_two_more_columns(tmp_path: Path) -> None:
    report = Report("Steps", tmp_path / "table.md", [], predictions=Predictions.of("a card of no prediction"))
    report.add("GPT step", Row("GPT 1.3 B, O2: speed", "106 ms", "bf16-amp 131 ms", 1.23))
    lines = [line for line in report.path.read_text().splitlines() if line.startswith("| ")]
    assert lines[0] == f"| {' | '.join(BESIDE_PREDICTIONS)} |"
    assert lines[-1].count(" | ") == lines[0].count(" | ")
