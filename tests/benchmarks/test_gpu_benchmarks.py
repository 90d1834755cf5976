"""The GPU benchmarks run to the end at tiny sizes, on the CPU and on a GPU. They write a table; a failure becomes a row."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import figures
from benchmarks.curves import Run, smooth
from benchmarks.gpu import (
    accuracy,
    kernels,
    largest,
    predicted_largest,
    predicted_memory,
    quantization,
    session,
    speedups,
    train,
)
from benchmarks.gpu.report import BESIDE_PREDICTIONS, ERROR, NOT_REACHED, Report, Row, Target, first_line
from benchmarks.gpu.session import Case, Ceilings, Section, Session
from benchmarks.gpu.timing import Timer, Timing
from octet.worker.fp8.speedups import load_tables
from tests.kit.waiting import WHOLE_RUN_S

ROOT = Path(__file__).parent.parent.parent
SECTIONS = {
    "kernels": ["Quantize", "AdamW step", "Gradients in FP8", "Linear layer, forward and backward", "Speedup by shape"],
    "train": [
        *("GPT step", "Cost of statistics", "CUDA graphs", "Job", "Memory with options", "Memory of vision models"),
        *("Largest GPT", "Other levels"),
    ],
    "accuracy": ["Loss", "Time to the same loss"],
}


@pytest.mark.slow
@pytest.mark.timeout(2 * WHOLE_RUN_S)
@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param("accuracy", "cpu", marks=pytest.mark.system),
        pytest.param("kernels", "cpu", marks=pytest.mark.matrix),
        pytest.param("train", "cpu", marks=pytest.mark.matrix),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in SECTIONS),
    ],
)
def test_a_benchmark_fills_every_section_of_its_table(name: str, device: str, tmp_path: Path) -> None:
    given = ["--smoke", "--device", device, "--budget-s", f"{WHOLE_RUN_S:.0f}"]
    given += ["--seeds", "2"] if name == "accuracy" else []
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", *given, "--out", str(tmp_path / "out")]
    command += ["--runs", str(tmp_path / "runs")] if name == "accuracy" else []
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WHOLE_RUN_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "out").glob(f"*-gpu-{name}-smoke.md")
    text = path.read_text()
    assert f"`{' '.join(['python -m', f'benchmarks.gpu.{name}', *given])}`" in text
    assert str(tmp_path) not in text
    tables = read_tables(text)
    assert list(tables) == SECTIONS[name]
    for section, rows in tables.items():
        assert rows, f"{section} has no row"
        assert not [row for row in rows if row[1] in (ERROR, NOT_REACHED)]
    if name == "kernels":
        device_name = "CPU" if device == "cpu" else torch.cuda.get_device_name()
        tables = load_tables(path.parent / "speedups-smoke.json")
        (measured,) = [table for table in tables if table.device == device_name]
        assert measured.source == "measured"
        assert measured.speedup(32, 16, 32, "scaled", "row") == measured.speedups["scaled"]["row"][0][0][1] > 0
    if name == "accuracy":
        assert (path.with_suffix(".png")).stat().st_size > 10_000


def test_codes_are_checked_before_they_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of scale passes, and codes that are wrong make a row of errors."""
    assert session.run("kernels", "A table", options(tmp_path, budget_s=60.0, sections="quantize"), kernels.sections) == 0
    monkeypatch.setattr(quantization, "E4M3", torch.float8_e5m2)
    assert session.run("kernels", "A table", options(tmp_path, budget_s=60.0, sections="quantize"), kernels.sections) == 1
    sound_path, wrong_path = sorted(tmp_path.glob("*.md"), key=lambda path: len(path.stem))
    sound_rows, wrong_rows = (read_tables(path.read_text())["Quantize"] for path in (sound_path, wrong_path))
    assert len(sound_rows) == len(wrong_rows) == 2 * len(quantization.WAYS)
    assert ERROR not in {row[1] for row in sound_rows}
    assert {row[1] for row in wrong_rows} == {ERROR}
    assert "the codes are off by 5." in wrong_rows[0][7]


def test_errors_and_unreached_cases_become_rows_and_the_run_continues(tmp_path: Path) -> None:
    cases = [Case("broken", partial(broken, "/some/folder/file.py is broken\nand more")), Case("sound", sound)]
    late = [Case("slow", slow), Case("never", sound), Case("compared", sound, expected_s=0.0)]
    status = session.run("kernels", "A table", options(tmp_path, budget_s=8.0), sections_of(cases, late))
    assert status == 1
    (path,) = tmp_path.glob("*.md")
    tables = read_tables(path.read_text())
    assert [row[:2] for row in tables["first"]] == [["broken", ERROR], ["sound", "1 ms"]]
    assert tables["first"][0][7] == "ValueError: file.py is broken"
    assert [row[:2] for row in tables["second"]] == [["slow", NOT_REACHED], ["never", NOT_REACHED], ["sound", "1 ms"]]


def test_a_second_run_overwrites_no_table(tmp_path: Path) -> None:
    for _ in range(3):
        session.run("kernels", "A table", options(tmp_path, budget_s=60.0), sections_of([Case("sound", sound)], []))
    stems = sorted(path.stem for path in tmp_path.glob("*.md"))
    assert stems == [stems[0], f"{stems[0]}-2", f"{stems[0]}-3"]


@pytest.mark.parametrize("beginnings", ["firts", "first,other"])
def test_a_section_that_there_is_not_ends_the_run(beginnings: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"--sections is '{beginnings}'; allowed: beginnings of first, second"):
        session.run(
            "kernels", "A table", options(tmp_path, budget_s=60.0, sections=beginnings), sections_of([Case("sound", sound)], [])
        )


def test_a_size_or_a_predicted_section_that_there_is_not_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ["--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train", "--smoke", "--sizes", "1.3,67", *out])
    with pytest.raises(SystemExit, match=r"--sizes is '1.3,67'; allowed: beginnings of 1.3 B, 350 M, 6.7 B"):
        train.main()
    monkeypatch.setattr(sys, "argv", ["predicted_memory", "--smoke", "--sections", "optoins", *out])
    with pytest.raises(SystemExit, match="--sections is 'optoins'; allowed: beginnings of GPT step, Options"):
        predicted_memory.main()
    assert not list(tmp_path.iterdir())


def test_a_second_measurement_overwrites_no_speedups(tmp_path: Path) -> None:
    cpu = Session(options(tmp_path, budget_s=60.0), torch.device("cpu"), Timer(torch.device("cpu")), Ceilings(1.0, 1.0))
    for number in (1.0, 2.0):
        list(speedups._write(cpu, (1,), (1,), {"scaled": {"row": [[[number]]]}}))
    first, second = (load_tables(tmp_path / name)[-1] for name in ("speedups-smoke.json", "speedups-smoke-2.json"))
    assert [table.speedups["scaled"]["row"] for table in (first, second)] == [[[[1.0]]], [[[2.0]]]]


def test_replayed_steps_are_compared_with_those_that_the_cost_of_statistics_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third part of a day on a GPU has no section of GPT steps."""
    measured = train.Measured(Timing(1.0, 0.0, 0.0), 100.0, 1, 1)
    monkeypatch.setattr(train, "_measure_gpt", lambda *_: measured)
    session_of_none: Any = None
    found: train.Found = {}
    list(train._statistics(session_of_none, train.SMALL[0], found))
    (way,) = [way for way in train.GRAPHED if way.name.startswith("O2")]
    (row,) = train._graph(session_of_none, train.SMALL[0], way, found)
    assert (row.reference, row.ratio) == ("launched by the host 100", 1.0)


def test_a_case_starts_without_what_the_timer_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies that keep a device busy are a gigabyte: they would count in the peak of the first case."""
    moments = []
    monkeypatch.setattr(Timer, "release", lambda _timer: moments.append("released"))

    def ceilings(*_arguments: object, **_options: object) -> Ceilings:
        moments.append("ceilings")
        return Ceilings(1.0, 1.0)

    def case() -> Iterator[Row]:
        moments.append("case")
        yield from sound()

    monkeypatch.setattr(session, "measure_ceilings", ceilings)
    session.run("kernels", "A table", options(tmp_path, budget_s=60.0), sections_of([Case("sound", case)], []))
    assert moments == ["ceilings", "released", "case"]


def test_the_time_to_the_same_loss_is_to_the_lowest_that_both_reach() -> None:
    steep, long = [4.0, 2.0, *[1.0] * 58], [*[4.0] * 10, *[2.0] * 50]
    fast, slow = Run("O2", steep, 6.2, step_time_s=0.5), Run("bf16-amp", long, 16.0, step_time_s=1.0)
    loss, (fast_s, slow_s) = accuracy.time_to_same_loss(fast, slow)
    assert loss == min(smooth(slow.losses))
    assert slow_s == 60.0
    reached = round(fast_s / 0.5)
    assert smooth(fast.losses)[reached - 1] <= loss < smooth(fast.losses)[reached - 2]


def test_gaps_are_those_of_seeds_that_both_levels_have() -> None:
    runs = {("bf16-amp", seed): Run("bf16-amp", [2.0 + seed], 16.0, 1.0) for seed in range(3)}
    runs |= {("O2", seed): Run("O2", [(2.0 + seed) * (1.01 + 0.001 * seed)], 6.2, 1.0) for seed in range(2)}
    [o2, missing] = accuracy._gaps(runs, ("bf16-amp", "O2", "O3-split"))
    assert o2.ratio == pytest.approx(0.0105)
    assert "2 seeds: +1.00, +1.10 %" in o2.note
    assert "± 0.64 %" in o2.measured
    assert missing.measured == NOT_REACHED


def test_a_run_without_errors_ends_with_0(tmp_path: Path) -> None:
    assert session.run("kernels", "A table", options(tmp_path, budget_s=60.0), sections_of([Case("sound", sound)], [])) == 0


def test_a_ratio_meets_a_target_from_its_own_side() -> None:
    faster, smaller = Target(1.2, 1.3), Target(0.6, 0.5, lower_is_better=True)
    assert [faster.met(ratio) for ratio in (1.19, 1.2, 1.3)] == ["no", "ship", "ahead"]
    assert [smaller.met(ratio) for ratio in (0.61, 0.6, 0.5)] == ["no", "ship", "ahead"]
    assert not_a_number_meets_nothing(faster)
    assert not_a_number_meets_nothing(smaller)


def not_a_number_meets_nothing(target: Target) -> bool:
    return target.met(float("nan")) == "no"


@pytest.mark.parametrize(("start", "capacity"), [(1, 100), (5, 100), (30, 100), (12, 16), (3, 5)])
def test_the_search_finds_what_fits(start: int, capacity: int) -> None:
    def peak_bytes_of(num_layers: int) -> int | None:
        peak = 7 + 3 * num_layers
        return peak if peak <= capacity else None

    fits, fails = largest.search(peak_bytes_of, start, capacity, lambda: True)
    expected = max(0, (capacity - 7) // 3)
    assert (fits, fails) == (expected, expected + 1)


def test_the_search_keeps_what_it_found_when_time_is_up() -> None:
    tries = iter((True, True, False))
    assert largest.search(lambda layers: 10 * layers, 4, 1000, lambda: next(tries)) == (100, 0)


def test_the_largest_predicted_gpt_fits_where_the_peak_has_a_kink() -> None:
    """Up to 20 layers one moment peaks, then another: between three points, numbers of layers are safe."""
    tried = []

    def peak(num_layers: int) -> int:
        tried.append(num_layers)
        return max(1000 + 10 * num_layers, 800 + 20 * num_layers)

    peaks = predicted_largest.peaks_up_to(peak, 2000)
    assert tried == [2, 4, 101]
    assert peaks.points[-1] == (101, 2820)
    most = {capacity: peaks.most_layers(capacity) for capacity in (1015, 1100, 2000)}
    assert most == {1015: 1, 1100: 7, 2000: 56}
    assert all(max(1000 + 10 * num_layers, 800 + 20 * num_layers) <= capacity for capacity, num_layers in most.items())
    exact = predicted_largest.peaks_up_to(lambda num_layers: 1000 + 10 * num_layers, 2000)
    assert [exact.most_layers(capacity) for capacity in (1005, 1500, 2000)] == [0, 50, 100]


def test_no_folder_of_this_machine_is_shown() -> None:
    words = ["--smoke", "--out", "/a/b", "--budget-s", "30", "--runs=/c/d"]
    assert figures.command_line("benchmarks.gpu.train", words) == "python -m benchmarks.gpu.train --smoke --budget-s 30"
    assert first_line(RuntimeError("\n/a/b/c.py: no\nmore")) == "RuntimeError: c.py: no"


def options(folder: Path, budget_s: float, sections: str = "") -> argparse.Namespace:
    words = ["--smoke", "--out", str(folder), "--budget-s", str(budget_s), "--sections", sections]
    return session.parser(None).parse_args(words)


def sections_of(first: list[Case], second: list[Case]):  # noqa: ANN201
    def sections(_session: Session, _report: Report) -> list[Section]:
        return [Section("first", first, share=0.5), Section("second", second, share=0.5)]

    return sections


def broken(message: str) -> Iterator[Row]:
    yield from ()
    raise ValueError(message)


def sound() -> Iterator[Row]:
    yield Row("sound", "1 ms")


def slow() -> Iterator[Row]:
    time.sleep(30)
    yield Row("slow", "30 s")


def read_tables(text: str) -> dict[str, list[list[str]]]:
    """Return the cells of each section's rows. Every line of a table must have as many cells as its head."""
    tables: dict[str, list[list[str]]] = {}
    for part in text.split("\n## ")[1:]:
        name, *lines = part.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        assert rows[0] == list(BESIDE_PREDICTIONS)
        assert all(len(row) == len(BESIDE_PREDICTIONS) for row in rows)
        tables[name] = rows[2:]
    return tables
