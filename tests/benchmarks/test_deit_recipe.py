"""The benchmark of DeiT's recipe: a few steps of it, and what is finished is not repeated."""

import json
from pathlib import Path

import pytest

from benchmarks import deit_recipe


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_a_short_run_has_a_curve_and_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--steps", "20", "--variants", "plain,digits", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert deit_recipe.main(command) == 0
    kept = sorted((tmp_path / "runs").glob("*.json"))
    assert [path.stem for path in kept] == ["digits-seed0-20", "plain-seed0-20"]
    curve = deit_recipe.Curve(**json.loads(kept[0].read_text()))
    assert [step for step, *_ in curve.evaluations] == list(range(2, 21, 2))
    assert len(curve.losses) == 20
    kept[0].write_text(json.dumps(json.loads(kept[0].read_text()) | {"evaluations": [[20, 1.25, 0.5]]}))
    capsys.readouterr()
    assert deit_recipe.main(command) == 0
    printed = capsys.readouterr().out
    assert "| 1.250 | 50.0 % |" in printed
    assert (next(tmp_path.glob("*-deit-recipe.md"))).read_text() == printed
