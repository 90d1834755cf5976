"""The demo's table against figures worked out by hand."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from octet.api_schemas import Job, JobSummary
from octet.client.demo.comparison import has_learned, learning_line, side_by_side, start_times, verdict

MakeJob = Callable[..., Job]
MakeSummary = Callable[..., JobSummary]


@pytest.fixture
def pair(spec: dict[str, Any], make_job: MakeJob, make_summary: MakeSummary) -> list[Job]:
    """fp32 with 16 bytes per parameter, and O2 with 6 in its 800 converted parameters and 16 in the other 200."""
    converted = {"weights": 1600, "gradients": 800, "exp_avg": 800, "exp_avg_sq": 1600}
    held = {name: count + 800 for name, count in converted.items()}
    o2_summary = make_summary(evaluation_loss=2.04, memory_bytes=held, converted_memory_bytes=converted)
    fp32 = make_job(state="succeeded", summary=make_summary(), spec=spec | {"precision": {"level": "fp32"}})
    return [fp32, make_job(state="succeeded", summary=o2_summary)]


def rows(table: Table) -> dict[str, list[str]]:
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    split = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in console.file.getvalue().splitlines()]
    return {cells[0]: cells[1:] for cells in split}


def test_bytes_per_parameter_and_savings(pair: list[Job]) -> None:
    shown = rows(side_by_side(pair))
    assert shown["weights"] == ["4.00", "2.40"]
    assert shown["exp_avg"] == ["4.00", "1.60"]
    assert shown["master_weights"] == ["0.00", "0.00"]
    assert shown["total"] == ["16.00", "8.00"]
    assert shown["saving"] == ["–", "50%"]
    assert shown["in converted layers"] == ["16.00", "6.00"]
    assert shown["saving there"] == ["–", "62%"]
    assert shown["evaluation loss"] == ["2.0000", "2.0400"]
    assert shown["tokens/s"] == ["5,120", "5,120"]


def test_a_level_that_converts_nothing_has_no_saving_there(
    pair: list[Job], make_job: MakeJob, make_summary: MakeSummary
) -> None:
    plain = make_job(state="succeeded", summary=make_summary(num_converted_parameters=0, converted_memory_bytes={}))
    shown = rows(side_by_side([plain, pair[1]]))
    assert shown["in converted layers"] == ["–", "6.00"]
    assert shown["saving there"] == ["–", "–"]


def test_the_verdict_is_one_line(pair: list[Job]) -> None:
    assert verdict(pair) == "fp32 holds 16.00 bytes per parameter, O2 8.00 (50% less) at +2.00% evaluation loss."
    assert verdict(pair[:1]) == "fp32 holds 16.00 bytes per parameter."


@pytest.mark.parametrize(("loss", "learned"), [(2.56, True), (2.561, False)])
def test_a_job_has_learned_at_four_fifths_of_the_entropy(make_summary: MakeSummary, loss: float, learned: bool) -> None:
    assert has_learned(make_summary(evaluation_loss=loss)) is learned


def test_the_learning_line_names_the_job_that_did_not_learn(
    pair: list[Job], make_job: MakeJob, make_summary: MakeSummary
) -> None:
    stuck = make_job(state="succeeded", summary=make_summary(evaluation_loss=3.1))
    text = learning_line([pair[0], stuck])
    assert "3.200 nats" in text
    assert "80% of it, 2.560: fp32 2.000 (yes), O2 3.100 (NO)." in text


def test_start_times_count_from_the_acceptance(pair: list[Job]) -> None:
    assert rows(start_times(pair))["first"] == ["0.25", "–", "–", "–", "3.50"]
