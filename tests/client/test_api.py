"""`Client` against the real application: every call, what it sends and what comes back."""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octet.api_schemas import (
    CheckpointReport,
    EvaluationReport,
    FailureReason,
    FinishedReport,
    Job,
    JobSpec,
    JobState,
    JobSummary,
    LogReport,
)
from octet.api_schemas.catalog import model_families
from octet.api_schemas.levels import LEVELS
from octet.client import ApiError, Client, SpecRefused
from octet.client.job_file import check_spec
from tests.client.octet_app import API_KEY, OctetApp, step_report
from tests.docs.blocks import blocks

MakeSummary = Callable[..., JobSummary]


def test_a_submitted_job_can_be_read_and_found(client: Client, runnable: dict[str, Any]) -> None:
    job = client.submit(JobSpec.model_validate(runnable | {"labels": {"team": "research"}}))
    assert job.state is JobState.QUEUED
    assert job.queue is not None
    assert client.job(job.id) == job
    assert job.id in [found.id for found in client.jobs(label="team:research", state="queued", name="first", pool="cpu")]
    assert job.id not in [found.id for found in client.jobs(state="failed")]


def test_the_example_of_the_docs(app: OctetApp, client: Client, runnable: dict[str, Any], make_summary: MakeSummary) -> None:
    def train() -> None:
        while (job := next(client.jobs(name="from-python"), None)) is None:
            time.sleep(0.02)
        rank = app.start_rank(job.id)
        rank.train(steps=3)
        rank.succeed(make_summary())

    (example,) = blocks("docs/job-lifecycle.md", "python")
    example = example.replace("http://127.0.0.1:8000", app.url).replace("/usr/share/doc", runnable["data"]["path"])
    thread = threading.Thread(target=train)
    thread.start()
    shown: dict[str, Any] = {}
    exec(example, shown)
    thread.join()
    assert len(shown["losses"]) == 3
    assert shown["job"].state is JobState.SUCCEEDED


def test_one_key_is_one_job(client: Client, runnable: dict[str, Any]) -> None:
    first = client.submit(runnable, "key-of-this-test")
    assert client.submit(runnable, "key-of-this-test").id == first.id
    assert client.submit(runnable).id != first.id
    with pytest.raises(ApiError, match="idempotency_mismatch"):
        client.submit(runnable | {"priority": 1}, "key-of-this-test")


def test_pages_are_joined(client: Client, runnable: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [client.submit(runnable | {"name": "paged"}).id for _ in range(5)]
    monkeypatch.setattr("octet.client.api.MOST_JOBS_PER_PAGE", 2)
    assert [job.id for job in client.jobs(name="paged")] == ids[::-1]
    assert [job.id for job in client.jobs(name="paged", limit=3)] == ids[:1:-1]


def test_validation_gives_the_plan_or_the_violations(client: Client, runnable: dict[str, Any]) -> None:
    valid = client.validate(runnable)
    assert valid.num_parameters == valid.sizes.num_parameters > valid.num_block_weights > 0
    assert list(client.jobs(name="only-validated")) == []
    with pytest.raises(ApiError) as refused:
        client.validate(runnable | {"name": "only-validated", "data": {"path": "/does/not/exist"}})
    assert [violation.field for violation in refused.value.problem.errors] == ["data.path"]
    assert "change: " in str(refused.value)


def test_a_spec_is_checked_and_the_catalog_read_without_a_server(client: Client, runnable: dict[str, Any]) -> None:
    assert Client.check(runnable) == client.validate(runnable)
    with pytest.raises(SpecRefused, match=r"precision\.level"):
        Client.check(runnable | {"precision": {"level": "02"}})
    assert [level.name for level in Client.levels()] == list(LEVELS)
    assert list(Client.models()) == model_families()


def test_the_servers_violations_are_those_found_here(client: Client, runnable: dict[str, Any]) -> None:
    bad = runnable | {"precision": {"level": "02"}, "trainin": 1}
    with pytest.raises(SpecRefused) as here:
        check_spec(bad, "job.yaml")
    with pytest.raises(ApiError) as there:
        client.submit(bad)
    assert there.value.problem.errors == here.value.violations


def test_an_unknown_job_is_an_error_everywhere(client: Client) -> None:
    unknown = "job_" + "0" * 26
    calls: list[Callable[[], Any]] = [
        lambda: client.job(unknown),
        lambda: client.cancel(unknown),
        lambda: client.pause(unknown),
        lambda: client.resume(unknown),
        lambda: client.clone(unknown),
        lambda: client.retry(unknown),
        lambda: client.change(unknown, {}),
        lambda: client.delete(unknown),
        lambda: list(client.events(unknown)),
        lambda: list(client.events(unknown, follow=True)),
        lambda: list(client.logs(unknown)),
        lambda: list(client.metrics(unknown)),
        lambda: list(client.checkpoints(unknown)),
        lambda: list(client.attempts(unknown)),
        lambda: client.wait(unknown),
    ]
    for call in calls:
        with pytest.raises(ApiError) as refused:
            call()
        assert refused.value.problem.status == 404


def test_cancel_ends_what_waits_and_refuses_what_is_over(client: Client, runnable: dict[str, Any]) -> None:
    job = client.submit(runnable)
    assert client.cancel(job.id).state is JobState.CANCELLED
    assert client.wait(job.id, timeout_s=0).state is JobState.CANCELLED
    with pytest.raises(ApiError, match="illegal_transition"):
        client.cancel(job.id)


def test_what_a_run_leaves_behind(app: OctetApp, client: Client, runnable: dict[str, Any], make_summary: MakeSummary) -> None:
    job = client.submit(runnable)
    rank = app.start_rank(job.id)
    rank.train(steps=3)
    rank.report(
        EvaluationReport(step=3, loss=2.5, tokens=512),
        CheckpointReport(step=3, name="step_0000000003", num_bytes=10, sha256="a" * 64, loss=2.97),
        LogReport(level="INFO", message="half way"),
    )
    running = client.job(job.id)
    assert running.state is JobState.RUNNING
    assert running.progress is not None
    assert running.progress.step == 3
    rank.succeed(make_summary())
    done = client.wait(job.id, timeout_s=5)
    assert done.state is JobState.SUCCEEDED
    assert done.summary == make_summary()
    assert done.start is not None
    assert done.start.first_step_at is not None
    points = list(client.metrics(job.id))
    assert [point.step for point in points] == [1, 2, 3]
    assert points[-1].evaluation_loss == 2.5
    assert [point.step for point in client.metrics(job.id, after=2)] == [3]
    assert [checkpoint.step for checkpoint in client.checkpoints(job.id)] == [3]
    assert [attempt.node for attempt in client.attempts(job.id)] == ["node-1"]
    assert [line.message for line in client.logs(job.id)] == ["half way"]
    assert list(client.logs(job.id, rank=1)) == []
    events = list(client.events(job.id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.seq for event in client.events(job.id, after=2)] == list(range(3, len(events) + 1))
    assert list(client.events(job.id, follow=True)) == events


def test_following_gives_everything_while_it_happens(app: OctetApp, client: Client, runnable: dict[str, Any]) -> None:
    job = client.submit(runnable)
    rank = app.start_rank(job.id)
    rank.train(steps=1)
    lines = client.logs(job.id, follow=True)
    rank.report(LogReport(level="INFO", message="first\u2028still first"))
    assert next(lines).message == "first\u2028still first"
    rank.report(LogReport(level="ERROR", message="second"))
    assert next(lines).message == "second"
    rank.report(FinishedReport(outcome="failed", reason=FailureReason.DATA_ERROR, message="no data"))
    assert list(lines) == []


def test_following_begins_with_the_last_lines_of_what_is_wanted(
    app: OctetApp, client: Client, runnable: dict[str, Any]
) -> None:
    job = client.submit(runnable)
    rank = app.start_rank(job.id)
    rank.report(*[LogReport(level="INFO", message=f"line {number}") for number in range(4)])
    [attempt] = client.attempts(job.id)
    lines = client.logs(job.id, follow=True, tail=2, rank=0, attempt_id=attempt.id, since=job.created_at)
    assert [next(lines).message for _ in range(2)] == ["line 2", "line 3"]
    others = client.logs(job.id, follow=True, rank=1)
    rank.report(LogReport(level="INFO", message="line 4"))
    assert next(lines).message == "line 4"
    rank.report(FinishedReport(outcome="failed", reason=FailureReason.DATA_ERROR, message="no data"))
    assert list(lines) == list(others) == []


def test_waiting_sees_each_change(app: OctetApp, client: Client, runnable: dict[str, Any], make_summary: MakeSummary) -> None:
    job = client.submit(runnable)
    rank = app.start_rank(job.id)
    rank.train(steps=2)
    seen: list[tuple[str, int]] = []

    def on_progress(changed: Job) -> None:
        assert changed.progress is not None
        seen.append((changed.state.value, changed.progress.step))
        if len(seen) == 1:
            rank.report(step_report(3))
        elif len(seen) == 2:
            rank.succeed(make_summary())

    assert client.wait(job.id, 10, on_progress, poll_s=0.01).state is JobState.SUCCEEDED
    assert seen == [("running", 2), ("running", 3), ("succeeded", 3)]


def test_models_levels_and_pools(client: Client) -> None:
    assert list(client.models()) == model_families()
    assert list(client.levels()) == list(LEVELS.values())
    assert [pool.name for pool in client.pools()] == ["cpu"]
    # Jobs of other tests on this server may have fired alerts of their own.
    assert "OctetNoLeader" in [alert.name for alert in client.alerts()]


def test_nobody_leads_so_the_server_is_not_ready(client: Client) -> None:
    assert client.is_ready() is False


def test_a_server_with_keys(tmp_path: Path, runnable: dict[str, Any]) -> None:
    with OctetApp(tmp_path, api_keys=(API_KEY,)) as app:
        for key in (None, "wrong-key-of-the-tests"):
            with Client(app.url, key) as stranger, pytest.raises(ApiError, match="unauthenticated"):
                stranger.submit(runnable)
        with Client(app.url, API_KEY) as friend:
            assert friend.submit(runnable).state is JobState.QUEUED


def test_submissions_at_once_under_one_key_are_one_job(app: OctetApp, runnable: dict[str, Any]) -> None:
    ids: list[str] = []

    def submit() -> None:
        with Client(app.url) as own:
            ids.append(own.submit(runnable, "key-of-the-race").id)

    threads = [threading.Thread(target=submit) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 6
    assert len(set(ids)) == 1


def test_a_job_is_followed_through_a_restart_of_the_server(tmp_path: Path, runnable: dict[str, Any]) -> None:
    """The server stops and another takes over its port and database; the stream loses and repeats nothing."""
    with OctetApp(tmp_path) as before:
        client = Client(before.url, reconnect_s=20)
        job = client.submit(runnable)
        rank = before.start_rank(job.id)
        rank.train(steps=1)
        rank.report(LogReport(level="INFO", message="before"))
        lines = client.logs(job.id, follow=True)
        assert next(lines).message == "before"
    port = int(before.url.rpartition(":")[2])
    with OctetApp(tmp_path, port=port) as after:
        rank.report(LogReport(level="INFO", message="after"))
        rank.report(FinishedReport(outcome="failed", reason=FailureReason.DATA_ERROR, message="no data"))
        assert after.url == before.url
        assert [line.message for line in itertools.islice(lines, 5)] == ["after"]
    client.close()
