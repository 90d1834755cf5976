"""RESULTS.md: a figure's row is replaced, the others stay, and times of a loaded machine are refused."""

import os
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import RESULTS, Figure

OLD = Figure("start: ready (s)", "2.6", "± 0.1", "<= 3", "2026-11-23", "abc1234", "2 cores", "`python -m benchmarks.x`")


def test_a_figure_replaces_its_own_row_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    path = tmp_path / "RESULTS.md"
    other = Figure("accuracy: O2 | te (%)", "0.04", "", "", "2026-11-23", "abc1234", "2 cores", "`x`")
    figures.save(path, [OLD, other])
    path.write_text(f"# Title\n\n{path.read_text()}\nafter\n")
    figures.write(path, [Figure("start: ready (s)", "2.5")], "python -m benchmarks.y")
    before, rows, after = figures.read(path)
    assert before.startswith("# Title\n\n| figure |")
    assert after == "\nafter\n"
    assert list(rows) == ["accuracy: O2 ¦ te (%)", "start: ready (s)"]
    assert rows["start: ready (s)"].value == "2.5"
    assert rows["start: ready (s)"].command == "`python -m benchmarks.y`"
    assert "load 0.5" in rows["start: ready (s)"].machine


def test_times_of_a_loaded_machine_are_refused_and_counts_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.5, 0.5))
    path = tmp_path / "RESULTS.md"
    with pytest.raises(SystemExit, match=r"load average is 1000\.0 .* quiet machine"):
        figures.write(path, [OLD], "x")
    assert not path.exists()
    figures.write(path, [OLD], "x", "no GPU (counted)", is_timed=False)
    assert figures.read(path)[1][OLD.figure].machine == "no GPU (counted)"


def test_rows_of_another_machine_are_taken_over_with_this_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "commit", lambda: "")
    figures.write(tmp_path / "far.md", [OLD], "x", is_timed=False)
    monkeypatch.setattr(figures, "commit", lambda: "def5678")
    figures.save(tmp_path / "RESULTS.md", [])
    assert figures.main([str(tmp_path / "far.md"), "--into", str(tmp_path / "RESULTS.md")]) == 0
    assert figures.read(tmp_path / "RESULTS.md")[1][OLD.figure].commit == "def5678"


def test_a_file_without_the_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "RESULTS.md").write_text("# Results\n")
    with pytest.raises(ValueError, match="no table with the columns figure, value"):
        figures.save(tmp_path / "RESULTS.md", [OLD])


def test_our_own_table_can_be_read_and_names_files_that_exist() -> None:
    before, rows, after = figures.read(RESULTS)
    assert all(row.value and row.date and row.commit and row.machine and row.command for row in rows.values())
    named = {word.strip("`.,") for word in (before + after).split() if word.strip("`.,").startswith("20")}
    details = {path.name for path in RESULTS.with_name("results").iterdir()}
    assert {name if name.endswith(".md") else f"{name}.md" for name in named} <= details
