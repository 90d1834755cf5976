"""The benchmark of a job's overhead runs a job through `worker.main` and as many bare steps."""

import sys

import pytest

from benchmarks import job_overhead


@pytest.mark.matrix
def test_it_compares_each_step_of_a_job_with_a_bare_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_steps = job_overhead.NUM_WARM_UP + 5
    monkeypatch.setattr(sys, "argv", ["job_overhead", "--levels", "fp32", "--steps", str(num_steps)])
    assert job_overhead.main() in (0, 1)  # so few steps of a loaded machine prove no ratio
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| fp32 |")]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[1] == "4"  # the times between the bare steps that are timed
    assert 0.2 < float(cells[-1]) < 5
