"""Reports that a rank may send, what the service does with them, and how a superseded rank is ended."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import (
    CheckpointReport,
    ErrorCode,
    EvaluationReport,
    EventReport,
    FailureReason,
    FinishedReport,
    JobState,
    LogReport,
    PhaseReport,
    Problem,
    ReportBatch,
    ReportReply,
)
from octet.service.ingest import apply
from tests.service.databases import ON_SQLITE
from tests.service.simulation import curve
from tests.service.world import Rank, World, started, step


def post(client: TestClient, rank: Rank, batch: ReportBatch, token: str | None = None) -> Any:
    headers = {"Authorization": f"Bearer {token or rank.order.token}"}
    url = f"/internal/v1/attempts/{rank.order.attempt_id}/reports"
    return client.post(url, json=batch.model_dump(mode="json"), headers=headers)


def refused(response: Any, status: int, code: ErrorCode) -> Problem:
    problem = Problem.model_validate_json(response.content)
    assert (response.status_code, problem.code) == (status, code), response.text
    return problem


@ON_SQLITE
def test_a_batch_is_acknowledged_and_renews_the_lease(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    world.clock.turn(30)
    response = post(client, rank, rank.batch(step(1), step(2)))
    reply = ReportReply.model_validate_json(response.content)
    assert reply == ReportReply(desired="run", lease_s=60, acknowledged_seq=3)
    lease = world.attempts(job_id)[0].lease_expires_at
    assert lease is not None
    assert (lease - world.clock.now()).total_seconds() == 60


@ON_SQLITE
def test_a_batch_that_comes_twice_counts_once(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    batch = rank.batch(step(1), LogReport(level="INFO", message="one"))
    for _ in range(2):
        assert post(client, rank, batch).json()["acknowledged_seq"] == 3
    assert curve(world, job_id) == [1]
    assert [line["message"] for line in client.get(f"/v1/jobs/{job_id}/logs").json()["data"]] == ["one"]


@ON_SQLITE
def test_a_batch_that_overlaps_is_applied_from_where_it_is_new(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    first = rank.batch(step(1))
    second = rank.batch(step(2))
    post(client, rank, first)
    both = ReportBatch(epoch=1, rank=0, reports=(*first.reports, *second.reports))
    assert post(client, rank, both).json()["acknowledged_seq"] == 3
    assert curve(world, job_id) == [1, 2]


@ON_SQLITE
def test_a_gap_is_refused_with_the_number_that_is_missing(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.batch(step(1))
    problem = refused(post(client, rank, rank.batch(step(2))), 409, ErrorCode.SEQUENCE_GAP)
    assert "expected 2" in problem.detail
    assert curve(world, job_id) == []


@ON_SQLITE
def test_a_batch_with_one_bad_report_changes_nothing(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    batch = rank.batch(step(1), FinishedReport(outcome="succeeded"), step(2))
    refused(post(client, rank, batch), 422, ErrorCode.INVALID_REQUEST)
    assert curve(world, job_id) == []
    assert world.job(job_id).state is JobState.RUNNING


@ON_SQLITE
def test_only_the_attempt_s_own_token_opens_its_door(client: TestClient, world: World) -> None:
    _, rank = world.start()
    _, other = world.start(name="other")
    refused(post(client, rank, rank.batch(), token="wrong"), 401, ErrorCode.UNAUTHENTICATED)
    refused(post(client, rank, rank.batch(), token=other.order.token), 401, ErrorCode.UNAUTHENTICATED)
    no_token = client.post(f"/internal/v1/attempts/{rank.order.attempt_id}/reports", json={"epoch": 1, "rank": 0})
    refused(no_token, 401, ErrorCode.UNAUTHENTICATED)
    assert no_token.headers["www-authenticate"] == "Bearer"


@ON_SQLITE
def test_an_attempt_that_nobody_knows_has_no_token(client: TestClient, world: World) -> None:
    _, rank = world.start()
    stranger = Rank(world, rank.order.model_copy(update={"attempt_id": "att_01kg9ys7g0zn9d2mqxrybeyjtc"}))
    refused(post(client, stranger, stranger.batch()), 401, ErrorCode.UNAUTHENTICATED)


@ON_SQLITE
def test_without_the_token_nobody_learns_which_attempts_there_are(client: TestClient, world: World) -> None:
    unknown = ("att_01kg9ys7g0pgmnqbqqwk8bpker", "att_none", "job_01kg9ys7g0pgmnqbqqwk8bpker")
    _, rank = world.start()
    headers = {"Authorization": "Bearer wrong"}
    bodies: list[dict[str, Any]] = [rank.batch().model_dump(mode="json"), {"epoch": "not a number"}]
    answers = [
        client.post(f"/internal/v1/attempts/{attempt_id}/reports", json=body, headers=headers)
        for attempt_id in (rank.order.attempt_id, *unknown)
        for body in bodies
    ]
    assert {answer.status_code for answer in answers} == {401}
    assert len({json.dumps(answer.json() | {"instance": ""}) for answer in answers}) == 1
    assert len({json.dumps(dict(answer.headers) | {"content-length": ""}) for answer in answers}) == 1


@ON_SQLITE
def test_an_old_epoch_is_stale(client: TestClient, world: World) -> None:
    _, rank = world.start()
    batch = rank.batch().model_copy(update={"epoch": 7})
    refused(post(client, rank, batch), 409, ErrorCode.STALE_ATTEMPT)


@ON_SQLITE
@pytest.mark.parametrize("rank", [65_536, 2**31, 2**80])
def test_a_rank_that_no_job_can_have_is_refused(client: TestClient, world: World, rank: int) -> None:
    _, sender = world.start()
    batch = sender.batch().model_copy(update={"rank": rank})
    assert "less than 65536" in refused(post(client, sender, batch), 422, ErrorCode.INVALID_REQUEST).model_dump_json()


@ON_SQLITE
def test_an_attempt_that_is_over_hears_so_and_is_counted(client: TestClient, world: World) -> None:
    job_id, rank = world.start(max_failures=1)
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_LOST))
    refused(post(client, rank, rank.batch(step(1))), 409, ErrorCode.STALE_ATTEMPT)
    refused(post(client, rank, ReportBatch(epoch=1, rank=0)), 409, ErrorCode.STALE_ATTEMPT)
    assert curve(world, job_id) == []
    assert "octet_fenced_writes_total 2.0" in client.get("/metrics").text


@ON_SQLITE
def test_the_last_batch_may_be_sent_again_when_its_answer_was_lost(client: TestClient, world: World) -> None:
    _, rank = world.start()
    batch = rank.batch(FinishedReport(outcome="succeeded"))
    assert post(client, rank, batch).status_code == 200
    again = post(client, rank, batch)
    assert (again.status_code, again.json()["acknowledged_seq"]) == (200, 2)


@ON_SQLITE
def test_a_resumed_attempt_drops_the_curve_and_the_checkpoints_after_its_checkpoint(client: TestClient, world: World) -> None:
    def save(number: int) -> CheckpointReport:
        return CheckpointReport(step=number, name=f"step_{number:010}", num_bytes=1, sha256=f"{number}" * 64, loss=1.0)

    job_id, rank = world.start(max_failures=1)
    rank.send(step(1), step(2, loss=3.0), save(2), step(3), save(3))
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_LOST))
    world.turn(2)
    world.dispatch()
    world.dispatch()
    second = world.rank_of(job_id)
    assert [(each.step, each.name) for each in second.order.checkpoints] == [(3, "step_0000000003"), (2, "step_0000000002")]
    second.begin(resumed_from_step=2)
    progress = world.job(job_id).progress
    assert progress is not None
    assert (progress.step, progress.loss) == (2, 3.0)
    assert curve(world, job_id) == [1, 2]
    assert [each["step"] for each in client.get(f"/v1/jobs/{job_id}/checkpoints").json()["data"]] == [2]
    second.train(3, 4)
    points = client.get(f"/v1/jobs/{job_id}/metrics").json()["data"]
    assert [(point["step"], point["attempt_id"]) for point in points] == [
        (1, rank.order.attempt_id),
        (2, rank.order.attempt_id),
        (3, second.order.attempt_id),
        (4, second.order.attempt_id),
    ]


def test_an_evaluation_joins_its_step_also_in_a_later_batch(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.train(1)
    measured = {"top1_accuracy": 0.25, "top5_accuracy": None}
    rank.send(EvaluationReport(step=1, loss=0.0, tokens=1, metrics=measured), EvaluationReport(step=9, loss=1.0, tokens=1))
    rank.send(step(2), EvaluationReport(step=2, loss=1.0, tokens=1, metrics={"top1_accuracy": 0.5}), step(3))
    points = client.get(f"/v1/jobs/{job_id}/metrics").json()["data"]
    assert points[0]["evaluation_perplexity"] == 1.0
    assert [point["evaluation_metrics"] for point in points] == [measured, {"top1_accuracy": 0.5}, {}]
    assert "evaluation.without_step" in [event.type for event in world.events(job_id)]


@ON_SQLITE
def test_a_job_of_epochs_learns_its_steps_when_it_starts(
    client: TestClient, world: World, spec_document: dict[str, Any]
) -> None:
    training = {name: value for name, value in spec_document["training"].items() if name != "steps"}
    job_id = world.submit(training=training | {"epochs": 2})
    assert client.get(f"/v1/jobs/{job_id}").json()["progress"] is None
    assert f'octet_job_steps{{job_id="{job_id}"' not in client.get("/metrics").text
    world.dispatch()
    rank = world.rank_of(job_id)
    rank.send(started().model_copy(update={"steps": 12}))
    rank.train(1, 2)
    progress = client.get(f"/v1/jobs/{job_id}").json()["progress"]
    assert (progress["step"], progress["steps"], progress["remaining_s"]) == (2, 12, 5.0)
    (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith("octet_job_steps{")]
    assert line.endswith(" 12.0")


@ON_SQLITE
def test_other_ranks_may_not_speak_for_rank_0(client: TestClient, world: World) -> None:
    world.submit(workers=2)
    world.dispatch()
    order = next(iter(world.launcher.orders.values()))
    Rank(world, order).begin()
    for body in (step(1), started(), PhaseReport(phase="placed"), FinishedReport(outcome="succeeded")):
        second = Rank(world, order, rank=1)
        refused(post(client, second, second.batch(body)), 422, ErrorCode.INVALID_REQUEST)


@ON_SQLITE
def test_other_ranks_have_their_own_stream_and_hold_no_lease(client: TestClient, world: World) -> None:
    job_id = world.submit(workers=2)
    world.dispatch()
    order = next(iter(world.launcher.orders.values()))
    Rank(world, order).begin()
    lease = world.attempts(job_id)[0].lease_expires_at
    world.clock.turn(10)
    second = Rank(world, order, rank=1)
    assert post(client, second, second.batch(LogReport(level="INFO", message="here"))).status_code == 200
    assert world.attempts(job_id)[0].lease_expires_at == lease
    second.send(FinishedReport(outcome="failed", reason=FailureReason.OUT_OF_MEMORY, message="rank 1: no memory"))
    assert (world.job(job_id).message or "").endswith("at O2; rank 1: no memory")
    third = Rank(world, order, rank=2)
    refused(post(client, third, third.batch()), 422, ErrorCode.INVALID_REQUEST)


@ON_SQLITE
def test_nobody_cancels_but_the_user(client: TestClient, world: World) -> None:
    _, rank = world.start()
    refused(post(client, rank, rank.batch(FinishedReport(outcome="cancelled"))), 422, ErrorCode.INVALID_REQUEST)


@ON_SQLITE
def test_steps_before_the_start_are_refused(client: TestClient, world: World) -> None:
    job_id = world.submit()
    world.dispatch()
    rank = world.rank_of(job_id)
    refused(post(client, rank, rank.batch(step(1))), 422, ErrorCode.INVALID_REQUEST)


@ON_SQLITE
def test_a_log_has_an_end(client: TestClient, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "MAX_LOG_LINES", 3)
    job_id, rank = world.start()
    for _ in range(2):
        rank.send(*[LogReport(level="INFO", message="word") for _ in range(4)])
    assert len(client.get(f"/v1/jobs/{job_id}/logs").json()["data"]) == 3
    assert [event.type for event in world.events(job_id)].count("log.truncated") == 1


@ON_SQLITE
def test_the_events_of_ranks_have_an_end(client: TestClient, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "MAX_EVENTS", 3)
    job_id, rank = world.start()
    before = len(world.events(job_id))
    for _ in range(2):
        rank.send(*[EventReport(type="layer.demoted", message="word") for _ in range(4)])
    assert [event.type for event in world.events(job_id)][before:] == [*["layer.demoted"] * 3, "events.truncated"]
    rank.train(1, 2, 3, 4)
    rank.succeed()
    assert world.events(job_id)[-1].type == "job.succeeded", "those of the service come all the same"


@ON_SQLITE
@pytest.mark.parametrize("data", [{"k" * 65: 1}, {"key": "v" * 1025}, {str(number): 1 for number in range(17)}])
def test_an_event_is_small(client: TestClient, world: World, data: dict[str, Any]) -> None:
    _, rank = world.start()
    event = EventReport(type="some.event", message="word").model_copy(update={"data": data})
    refused(post(client, rank, rank.batch(event)), 422, ErrorCode.INVALID_REQUEST)


def test_text_with_zero_bytes_and_odd_moments_is_stored_on_both(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.send(
        LogReport(level="INFO", message="a\0b"),
        EventReport(type="worker.note", message="c\0d", data={"key": "e\0f", "big": 10**30}),
    )
    assert client.get(f"/v1/jobs/{job_id}/logs").json()["data"][0]["message"] == "a\ufffdb"
    event = client.get(f"/v1/jobs/{job_id}/events").json()["data"][-1]
    assert (event["message"], event["data"]["big"]) == ("c\ufffdd", 10**30)
    batch = rank.batch(LogReport(level="INFO", message="x")).model_dump(mode="json")
    for moment in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-01-01T00:00:00"):
        batch["reports"][0]["at"] = moment
        headers = {"Authorization": f"Bearer {rank.order.token}"}
        url = f"/internal/v1/attempts/{rank.order.attempt_id}/reports"
        assert client.post(url, json=batch, headers=headers).status_code == 422


@ON_SQLITE
def test_the_summary_is_the_job_s_result(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    summary = {
        "steps": 4,
        "final_loss": 1.5,
        "evaluation_loss": 1.25,
        "evaluation_perplexity": 3.49,
        "evaluation_metrics": {"token_accuracy": 0.25},
        "sent_bytes": {},
        "tokens": 512,
        "tokens_per_s": 256.0,
        "train_time_s": 2.0,
        "num_parameters": 1000,
        "num_converted_parameters": 800,
        "memory_bytes": {"weights": 4000},
        "converted_memory_bytes": {"weights": 3200},
        "host_memory_bytes": 0,
        "peak_memory_bytes": None,
        "mismatch": None,
        "reserved_memory_bytes": None,
        "step_time_s": None,
        "data": {"unigram_entropy_nats": 3.0},
    }
    rank.train(1, 2, 3, 4)
    rank.send(FinishedReport.model_validate({"outcome": "succeeded", "summary": summary}))
    assert client.get(f"/v1/jobs/{job_id}").json()["summary"] == summary
