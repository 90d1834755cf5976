"""The floors are found in the benchmarks' tables, and one that is not measured is noticed."""

import pytest

from benchmarks.control_plane_goals import FLOORS, figures_of, verdicts

TABLE = """| figure | . | first to last |
| --- | ---: | ---: |
| sqlite: 16 connections (1/s) | 799.00 (799.00 to 799.00) | 1.00 |
| postgresql: 16 connections (1/s) | 800.00 (1.00 to 2001.00) | 1.00 |
| sqlite: 16 connections, clients' mix (1/s) | 500.00 (499.00 to 500.00) | 1.00 |
| postgresql: 16 connections, clients' mix (1/s) | 499.90 (1.00 to 2001.00) | 1.00 |
| heartbeats, 8 connections (1/s) | 2001.00 (1.00 to 2001.00) | 1.00 |
| one job, p99 (ms) | 9.80 (1.00 to 2.00) | 1.00 |
| one job, 1000000 jobs, p99 (ms) | 5.00 (1.00 to 2.00) | 1.00 |
| page of 50, 1000000 jobs, p99 (ms) | 15.10 (1.00 to 2.00) | 1.00 |
| lag of events, 1000 streams, p99 (ms) | 250.10 (1.00 to 2.00) | 1.00 |
| postgresql: 1 api processes (1/s) | 700.00 (1.00 to 2.00) | 1.00 |
| postgresql: 2 api processes (1/s) | 1400.00 (1.00 to 2.00) | 1.00 |
| postgresql: 4 api processes (1/s) | 1500.00 (1.00 to 2.00) | 1.00 |
"""


def test_each_floor_is_compared_with_its_figure() -> None:
    rows = verdicts(figures_of(TABLE)).splitlines()[2:]
    assert len(rows) == len(FLOORS)
    held = {row.split("|")[1].strip(): row.rsplit("|", 2)[1].strip() for row in rows}
    assert held == {
        "sqlite: 16 connections (1/s)": "no",
        "postgresql: 16 connections (1/s)": "yes",
        "sqlite: 16 connections, clients' mix (1/s)": "yes",
        "postgresql: 16 connections, clients' mix (1/s)": "no",
        "heartbeats, 8 connections (1/s)": "yes",
        "one job, 1000000 jobs, p99 (ms)": "yes",
        "page of 50, 1000000 jobs, p99 (ms)": "no",
        "lag of events, 1000 streams, p99 (ms)": "yes",
        "postgresql: 1 api processes (1/s)": "",
        "postgresql: 2 api processes (1/s)": "",
        "postgresql: 4 api processes (1/s)": "",
    }


def test_a_floor_without_a_figure_is_an_error() -> None:
    figures = figures_of(TABLE)
    del figures["heartbeats, 8 connections (1/s)"]
    with pytest.raises(ValueError, match="heartbeats"):
        verdicts(figures)
