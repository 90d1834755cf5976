"""The benchmark of accuracy: what it concludes from gaps, and that it asks fp32 first."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import accuracy


def test_a_changed_start_is_a_thousandth_away() -> None:
    setting = accuracy.small_llama(64, 1)
    start = setting.build_model().state_dict()
    changed = replace(setting, start_change=1e-3).build_model().state_dict()
    for name, values in start.items():
        assert (changed[name] / values - 1)[values != 0].square().mean().sqrt() == pytest.approx(1e-3, rel=0.3)


@pytest.mark.matrix
def test_it_measures_chance_then_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--seeds",
        "2",
        "--steps",
        "2",
        "--hidden-size",
        "32",
        "--levels",
        "O2,O2-hopper,O2-hopper-fast",
        "--runs",
        str(tmp_path / "runs"),
        "--out",
        str(tmp_path),
    ]
    assert accuracy.main(arguments) in (0, 1)
    report = capsys.readouterr().out
    assert "the setting is calm" in report
    assert "| O2-hopper | O2-hopper-fast | fast accumulation" in report
    assert len(list((tmp_path / "runs").iterdir())) == 10
    assert [path.suffix for path in sorted(tmp_path.glob("*-accuracy.*"))] == [".md", ".png"]


@pytest.mark.matrix
def test_a_chaotic_setting_is_refused_before_any_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--seeds",
        "2",
        "--steps",
        "5",
        "--learning-rate",
        "1",
        "--runs",
        str(tmp_path / "runs"),
        "--out",
        str(tmp_path),
    ]
    assert accuracy.main(arguments) == 2
    assert "the setting is not calm" in capsys.readouterr().err
    assert list(tmp_path.glob("*.md")) == []
    assert {path.name[:5] for path in (tmp_path / "runs").iterdir()} == {"fp32-"}


def test_unknown_levels_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        accuracy.main(["--levels", "O9", "--runs", "unused"])
    assert "--levels has O9; allowed: fp32" in capsys.readouterr().err
