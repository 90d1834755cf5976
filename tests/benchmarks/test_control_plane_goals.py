"""The goals are found in the benchmarks' tables, and a goal that is not measured is noticed."""

import pytest

from benchmarks.control_plane_goals import GOALS, figures_of, verdicts

TABLE = """| figure | . | first to last |
| --- | ---: | ---: |
| sqlite: 16 connections (1/s) | 1999.00 (1999.00 to 1999.00) | 1.00 |
| sqlite: at 200/s, p99 (ms) | 25.00 (25.00 to 25.00) | 1.00 |
| postgresql: 16 connections (1/s) | 2000.00 (1.00 to 2001.00) | 1.00 |
| postgresql: at 200/s, p99 (ms) | 25.10 (1.00 to 26.00) | 1.00 |
| heartbeats, 8 connections (1/s) | 2001.00 (1.00 to 2001.00) | 1.00 |
| metric samples, batches of 20 (1/s) | 50000.00 (1.00 to 2.00) | 1.00 |
| metric samples, batches of 1000 (1/s) | 1.00 (1.00 to 2.00) | 1.00 |
| lag of events, 1000 streams, p99 (ms) | 250.10 (1.00 to 2.00) | 1.00 |
| report meanwhile, slowest (ms) | 50.00 (1.00 to 2.00) | 1.00 |
| memory, idle, without Ray (MiB) | 89.50 (1.00 to 2.00) | 1.00 |
| /healthz, p50 (ms) | 0.45 (0.45 to 0.45) | 1.00 |
| one job, p99 (ms) | 4.80 (1.00 to 2.00) | 1.00 |
| one job, 1000000 jobs, p99 (ms) | 9.00 (1.00 to 2.00) | 1.00 |
| page of 50, p99 (ms) | 7.50 (1.00 to 2.00) | 1.00 |
| page of 50, 1000000 jobs, p99 (ms) | 4.90 (1.00 to 2.00) | 1.00 |
| /metrics, 1000000 jobs, p50 (ms) | 136.00 (1.00 to 2.00) | 1.00 |
| submissions, 16 connections, 100000 queued (1/s) | 318.00 (1.00 to 2.00) | 1.00 |
| last job, 100000 queued, p99 (ms) | 20.50 (1.00 to 2.00) | 1.00 |
| page of 50, 100000 queued, p99 (ms) | 5.00 (1.00 to 2.00) | 1.00 |
| restart to reconciled, 1000 running jobs (s) | 2.18 (1.00 to 2.00) | 1.00 |
"""


def test_each_goal_is_compared_with_its_figure() -> None:
    figures = figures_of(TABLE)
    assert figures["metric samples, batches of 20 (1/s)"] == 50_000
    rows = verdicts(figures).splitlines()[2:]
    assert len(rows) == len(GOALS)
    reached = {row.split("|")[1].strip(): row.rsplit("|", 2)[1].strip() for row in rows}
    assert reached == {
        "sqlite: 16 connections (1/s)": "ship",
        "sqlite: at 200/s, p99 (ms)": "ahead",
        "postgresql: 16 connections (1/s)": "ahead",
        "postgresql: at 200/s, p99 (ms)": "no",
        "heartbeats, 8 connections (1/s)": "ahead",
        "metric samples, batches of 20 (1/s)": "ahead",
        "metric samples, batches of 1000 (1/s)": "no",
        "lag of events, 1000 streams, p99 (ms)": "no",
        "report meanwhile, slowest (ms)": "ahead",
        "memory, idle, without Ray (MiB)": "ahead",
        "/healthz, p50 (ms)": "ahead",
        "one job, p99 (ms)": "ahead",
        "page of 50, p99 (ms)": "ship",
        "page of 50, 1000000 jobs, p99 (ms)": "ahead",
        "/metrics, 1000000 jobs, p50 (ms)": "no",
        "submissions, 16 connections, 100000 queued (1/s)": "no",
        "last job, 100000 queued, p99 (ms)": "no",
        "page of 50, 100000 queued, p99 (ms)": "ahead",
        "restart to reconciled, 1000 running jobs (s)": "ahead",
    }


def test_a_goal_without_a_figure_is_an_error() -> None:
    figures = figures_of(TABLE)
    del figures["/healthz, p50 (ms)"]
    with pytest.raises(ValueError, match="healthz"):
        verdicts(figures)
