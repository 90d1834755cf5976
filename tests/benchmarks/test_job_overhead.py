"""The benchmark of a job's overhead runs a job through `worker.main` and as many bare steps."""

import sys

import pytest

from benchmarks import job_overhead


@pytest.mark.matrix
def test_it_compares_each_step_of_a_job_with_a_bare_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_steps = job_overhead.NUM_WARM_UP + 5
    arguments = ["--levels", "fp32", "--rounds", "2", "--steps", str(num_steps)]
    monkeypatch.setattr(sys, "argv", ["job_overhead", *arguments])
    assert job_overhead.main() in (0, 1)  # so few steps of a loaded machine prove no ratio
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| fp32 |")]
    for row, reports in zip(rows, job_overhead.RUN, strict=True):
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        assert cells[1] == reports
        assert cells[2] == "2 × 4"  # the times between the bare steps that are timed
        assert 0.2 < float(cells[-1].split(" ± ")[0]) < 5
