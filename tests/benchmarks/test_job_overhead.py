"""The benchmark of a job's overhead runs a job through `octet.worker.rank.main` and as many bare steps."""

import sys
from itertools import pairwise

import pytest

from benchmarks import job_overhead, job_steps
from benchmarks.job_steps import Found


@pytest.mark.matrix
def test_it_compares_each_step_of_a_job_with_a_bare_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_steps = job_overhead.NUM_WARM_UP + 5
    arguments = ["--levels", "fp32", "--rounds", "2", "--steps", str(num_steps)]
    monkeypatch.setattr(sys, "argv", ["job_overhead", *arguments])
    assert job_overhead.main() in (0, 1)  # so few steps of a loaded machine prove no ratio
    rows = [line.split("|")[1:] for line in capsys.readouterr().out.splitlines()]
    for (name, value, *_), reports in zip(rows, job_overhead.RUN, strict=True):
        assert f"job: fp32, reports to {reports}," in name
        assert 0.2 < float(value) < 5


def found(added_s: float, noise_s: float = 0.0) -> Found:
    """A round whose job takes so much more on the main thread than bare steps that slow down, with a step far off."""
    bare_s = [0.050 + 0.001 * step for step in range(21)]
    job_s = [(before + after) / 2 + added_s + noise_s for before, after in pairwise(bare_s)]
    job_s[7] += 1.0
    return Found(bare_s, job_s, threads_s=0.0004 * len(job_s))


def test_slow_drifts_and_single_steps_do_not_count_and_threads_do() -> None:
    one = found(0.001)
    assert one.added_s == pytest.approx(0.0014)
    assert one.throughput == pytest.approx(0.060 / 0.0614)


def test_the_whole_interval_has_to_lie_above_the_limit() -> None:
    assert job_steps.holds([found(0.0008, noise) for noise in (-1e-5, 0.0, 1e-5)])
    assert not job_steps.holds([found(0.0016, noise) for noise in (-1e-5, 0.0, 1e-5)])
    wide = [found(0.0008, noise) for noise in (-2e-3, 0.0, 2e-3)]
    assert sum(each.throughput for each in wide) / 3 > job_steps.LIMIT
    assert not job_steps.holds(wide)
