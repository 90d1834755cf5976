"""The benchmark of the families: a short version of each family at one seed, resumed from what is finished."""

import json
from pathlib import Path

import pytest

from benchmarks import families


@pytest.mark.system
@pytest.mark.parametrize(
    ("family", "steps"),
    [("gpt", 25), *(pytest.param(*each, marks=pytest.mark.matrix) for each in (("roberta", 60), ("deit", 100), ("swin", 60)))],
)
def test_one_seed_learns_and_is_kept(family: str, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--seeds", "1", "--families", family, "--levels", "O2", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert families.main([*command, "--steps", str(steps)]) == 0
    kept = sorted((tmp_path / "runs").glob(f"{family}-*.json"))
    names = [path.name.split("-seed0")[0] for path in kept]
    assert names == [f"{family}-O2", f"{family}-fp32", f"{family}-fp32-start-changed"]
    runs = [families.Run(**json.loads(path.read_text())) for path in kept]
    assert all(run.evaluation_loss < 0.9 * run.losses[0] for run in runs)
    assert all(run.evaluation_loss == pytest.approx(runs[1].evaluation_loss, rel=0.1) for run in runs)
    assert len({tuple(run.losses) for run in runs}) == 3
    for path in kept:  # a run that is read again keeps what is written there
        path.write_text(json.dumps(json.loads(path.read_text()) | {"evaluation_loss": 1.25}))
    assert families.main([*command, "--steps", str(steps), "--report-only"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("| O2 | 1 | 1.2500 | one seed: no interval |")]
    assert "3 of 3 runs are finished" in "\n".join(printed)
    assert next(tmp_path.glob("*-families.png")).stat().st_size > 10_000


def test_a_report_says_what_was_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path), "--report-only", "--levels", "O2"]
    assert families.main(command) == 0
    printed = capsys.readouterr().out
    assert "0 of 60 runs are finished" in printed
    assert printed.count("| O2 | 0 | not run |") == 4
    assert not list(tmp_path.glob("*.png"))
