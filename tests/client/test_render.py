"""A job as the client shows it, with and without each of its parts. Control characters never reach the terminal."""

import io
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console, RenderableType

from octet.api_schemas import Checkpoint, Job, JobState, JobSummary, LogLine, MetricPoint
from octet.api_schemas.catalog import model_families
from octet.client import render
from octet.client.text import duration, num_bytes, number, printable

MakeJob = Callable[..., Job]
MakeSummary = Callable[..., JobSummary]
AT = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


def lines(what: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def facts(job: Job, checkpoints: Sequence[Checkpoint] = ()) -> dict[str, str]:
    split = [line.split(maxsplit=1) for line in lines(render.job_details(job, checkpoints))]
    return {words[0]: words[1] for words in split}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (60, "1:00"),
        (754.6, "12:35"),
        (3661, "1:01:01"),
        (90000, "1 day, 1:00:00"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(None, "–"), (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (12_345_678, "12.3 MB"), (10**18, "1e+03 PB")]
)
def test_bytes(count: int | None, text: str) -> None:
    assert num_bytes(count) == text


def test_numbers_keep_zero_and_mark_what_is_missing() -> None:
    assert [number(0.0), number(None), number(12345.678, ",.0f")] == ["0.0000", "–", "12,346"]


def test_control_characters_are_written_out() -> None:
    assert printable("a\x1b[31mred\r\x9b\ttab\nline") == "a\\x1b[31mred\\x0d\\x9b\ttab\nline"


def test_every_state_has_a_style() -> None:
    assert set(render.STATE_STYLES) == set(JobState)


def test_jobs_are_listed_with_and_without_progress(make_job: MakeJob) -> None:
    progress = {"step": 7, "steps": 100, "loss": 2.5, "tokens_per_s": 10.0, "remaining_s": 5.0, "reported_at": AT}
    header, first, second = lines(render.jobs_table([make_job(), make_job(progress=progress)]))
    assert header.split()[:4] == ["ID", "NAME", "LEVEL", "STATE"]
    assert " ".join(first.split()) == "job_0123456789abcdefghjkmnpqrs first O2 running –/100 – cpu 2026-01-31 12:00:00 UTC"
    assert second.split()[4:6] == ["7/100", "2.5000"]


def test_a_job_of_epochs_has_no_number_of_steps_until_a_rank_counts_them(make_job: MakeJob) -> None:
    job = make_job()
    training = job.spec.training.model_copy(update={"steps": None, "epochs": 2.0})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"training": training})})
    assert "–/–" in lines(render.jobs_table([job]))[1]


def test_a_curve_has_a_column_for_each_metric_of_its_family() -> None:
    fields = {"at": AT, "attempt_id": "att_1", "loss": 2.0, "gradient_norm": 1.0, "learning_rate": 0.1, "tokens": 10}
    times = {"step_time_s": 1.0, "data_wait_s": 0.0, "tokens_per_s": 10.0}
    evaluations: list[dict[str, Any]] = [{}, {"evaluation_metrics": {"top1_accuracy": 0.25, "top5_accuracy": None}}]
    points = [MetricPoint.model_validate(fields | times | each | {"step": step}) for step, each in enumerate(evaluations, 1)]
    header, first, second = lines(render.metrics_table(points))
    assert "EVALUATION LOSS  TOP1 ACCURACY  TOP5 ACCURACY  GRADIENT NORM" in header
    assert first.split()[2:5] == ["–", "–", "–"]
    assert second.split()[2:5] == ["–", "25.00%", "–"]


def test_families_without_presets_are_listed_with_what_a_job_names_instead() -> None:
    shown = {line.split()[0]: line for line in lines(render.models_table(model_families()))}
    assert "138 architectures" in shown["huggingface"]
    assert "your own network" in shown["python"]
    assert shown.keys() == {"FAMILY", *(family.family for family in model_families())}


def test_a_queued_job_says_why_it_waits(make_job: MakeJob) -> None:
    job = make_job(state="queued", queue={"position": 2, "why": "1 of 2 slots is free"})
    assert facts(job)["waits"] == "number 2 in pool cpu: 1 of 2 slots is free"
    assert render.progress_words(job) == "1 of 2 slots is free"


def test_a_failed_job_says_why_and_what_to_do(make_job: MakeJob) -> None:
    job = make_job(state="failed", reason="out_of_memory", message="\x1b[2Jgone", hint="Lower it.", num_failures=1)
    shown = facts(job)
    assert shown["reason"] == "out_of_memory: \\x1b[2Jgone"
    assert shown["hint"] == "Lower it."
    assert shown["attempts"] == "1, failed 1 of at most 0 retried"


def test_settings_that_are_not_applied_are_named(make_job: MakeJob) -> None:
    job = make_job()
    sharded = job.spec.precision.model_copy(update={"not_applied": ("fsdp_config: fsdp_version: weights are not sharded",)})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"precision": sharded})})
    assert facts(job)["ignored"] == "fsdp_config: fsdp_version: weights are not sharded"


def test_results_of_a_job(make_job: MakeJob, make_summary: MakeSummary) -> None:
    checkpoint = {"id": "ckpt_1", "job_id": "job_1", "attempt_id": "att_1", "created_at": AT, "sha256": "0" * 64}
    newest = [Checkpoint.model_validate(checkpoint | {"step": s, "num_bytes": 2_000_000, "loss": 1.5}) for s in (50, 100, 75)]
    shown = facts(make_job(state="succeeded", summary=make_summary()), newest)
    assert shown["checkpoints"] == "3, the newest at step 100 (2 MB)"
    assert shown["evaluation"] == "loss 2.0000, perplexity 7.389"
    assert shown["speed"] == "5,120 tokens/s, 25,600 tokens in 1:05"
    assert shown["memory"] == "16 kB: weights 4 kB, gradients 4 kB, exp_avg 4 kB, exp_avg_sq 4 kB"
    assert "host" not in shown


def test_states_in_host_memory_have_a_line_of_their_own(make_job: MakeJob, make_summary: MakeSummary) -> None:
    shown = facts(make_job(state="succeeded", summary=make_summary(host_memory_bytes=8000)))
    assert shown["memory"].startswith("16 kB: ")
    assert shown["host"].split() == ["memory", "8", "kB"]


def test_progress_hides_what_is_not_known(make_job: MakeJob) -> None:
    progress: dict[str, Any] = {"step": 7, "steps": 100, "loss": None, "tokens_per_s": None, "remaining_s": None}
    progress["reported_at"] = AT
    assert render.progress_words(make_job(progress=progress)) == "step 7/100, loss –"
    progress |= {"loss": 2.5, "tokens_per_s": 5120.4, "remaining_s": 61.0}
    assert render.progress_words(make_job(progress=progress)) == "step 7/100, loss 2.5000, 5,120 tokens/s, 1:01 left"


def test_a_traceback_in_the_log_keeps_its_lines() -> None:
    line = LogLine(seq=1, at=AT, attempt_id="att_1", rank=3, level="ERROR", message="Traceback\n  File \x1b[1m")
    assert lines(render.log_line(line)) == ["2026-01-31 12:00:00 UTC  rank 3  ERROR    Traceback", "  File \\x1b[1m"]


def test_a_time_is_local_with_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "CET-1")
    time.tzset()
    try:
        assert render.moment(datetime(2026, 1, 31, 23, 30, tzinfo=UTC)) == "2026-02-01 00:30:00 CET"
    finally:
        monkeypatch.undo()
        time.tzset()
