"""The benchmark of accuracy: what it concludes from gaps, and that it asks fp32 first."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import accuracy
from benchmarks.paired import Interval, gaps, why_not_calm


class TestInterval:
    def test_of_five_values(self) -> None:
        """Mean 3, standard deviation sqrt(2.5); t at 4 degrees of freedom is 2.776."""
        interval = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])
        assert interval.mean == 3.0
        assert interval.half_width == pytest.approx(2.776 * (2.5 / 5) ** 0.5)

    def test_it_holds_the_mean_in_95_of_100_cases(self) -> None:
        values = 7.0 + torch.randn(4000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        intervals = [Interval.of(each) for each in values.tolist()]
        share = sum(abs(each.mean - 7.0) <= each.half_width for each in intervals) / len(intervals)
        assert share == pytest.approx(0.95, abs=0.01)

    @pytest.mark.parametrize("num_values", [0, 1, 21])
    def test_other_numbers_of_values_are_refused(self, num_values: int) -> None:
        with pytest.raises(ValueError, match="allowed: 2 to 20"):
            Interval.of([1.0] * num_values)

    @pytest.mark.parametrize(
        ("mean", "verdict"),
        [(0.0, "inside"), (-0.3, "inside"), (0.31, "open"), (0.7, "open"), (0.71, "outside"), (-0.71, "outside")],
    )
    def test_verdict(self, mean: float, verdict: str) -> None:
        assert Interval(mean, 0.2).verdict(0.5) == verdict


def test_gaps_are_paired() -> None:
    assert gaps([2.2, 1.0], [2.0, 2.0]) == [pytest.approx(0.1), -0.5]
    with pytest.raises(ValueError, match="longer"):
        gaps([1.0], [1.0, 2.0])


def test_a_setting_is_calm_up_to_a_third_of_the_limit() -> None:
    assert why_not_calm(0.0008, 0.0025) is None
    assert "moves its final loss by 0.090%; allowed: 0.083%" in str(why_not_calm(0.0009, 0.0025))


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
        "te,O2",
        "--runs",
        str(tmp_path / "runs"),
        "--out",
        str(tmp_path),
    ]
    assert accuracy.main(arguments) in (0, 1)
    report = capsys.readouterr().out
    assert "the setting is calm" in report
    assert "| te | O2 | these, and moments" in report
    assert len(list((tmp_path / "runs").iterdir())) == 8
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
