"""The records of a job, as pages and as streams."""

import itertools
import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import CheckpointReport, EvaluationReport, LogReport
from tests.service.databases import ON_SQLITE
from tests.service.world import Rank, World, step


def save(number: int) -> CheckpointReport:
    return CheckpointReport(step=number, name=f"step_{number:010}", num_bytes=10, sha256="a" * 64, loss=1.0)


@pytest.fixture
def trained(world: World) -> tuple[str, Rank]:
    """A job that has trained three steps, saved twice, evaluated once and logged a few lines."""
    job_id, rank = world.start()
    rank.send(step(1), step(2), EvaluationReport(step=2, loss=2.0, tokens=64), save(2), step(3), save(3))
    rank.send(*[LogReport(level="INFO", message=f"line {number}") for number in range(5)])
    return job_id, rank


@ON_SQLITE
def test_metrics(client: TestClient, trained: tuple[str, Rank]) -> None:
    job_id, _ = trained
    page = client.get(f"/v1/jobs/{job_id}/metrics?limit=2").json()
    assert [point["step"] for point in page["data"]] == [1, 2]
    assert (page["has_more"], page["last_id"]) == (True, "2")
    assert page["data"][1]["evaluation_perplexity"] == pytest.approx(7.389056)
    assert page["data"][0]["evaluation_loss"] is None
    assert page["data"][0]["tokens_per_s"] == 256
    rest = client.get(f"/v1/jobs/{job_id}/metrics?after=2").json()
    assert [point["step"] for point in rest["data"]] == [3]


@ON_SQLITE
def test_an_evaluation_beyond_floats_has_no_perplexity(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.send(step(1), EvaluationReport(step=1, loss=1e6, tokens=1))
    assert client.get(f"/v1/jobs/{job_id}/metrics").json()["data"][0]["evaluation_perplexity"] is None


@ON_SQLITE
def test_events_and_logs_in_pages(client: TestClient, trained: tuple[str, Rank]) -> None:
    job_id, _ = trained
    for part in ("events", "logs"):
        seen: list[int] = []
        after = "0"
        while True:
            page = client.get(f"/v1/jobs/{job_id}/{part}?limit=2&after={after}").json()
            seen += [item["seq"] for item in page["data"]]
            if not page["has_more"]:
                break
            after = page["last_id"]
        assert seen == list(range(1, len(seen) + 1))
        assert len(seen) >= 5


def test_log_lines_of_a_rank_of_an_attempt_since_a_time_and_the_last(client: TestClient, trained: tuple[str, Rank]) -> None:
    job_id, _ = trained
    everything = client.get(f"/v1/jobs/{job_id}/logs").json()["data"]

    def found(query: str) -> list[str]:
        return [line["message"] for line in client.get(f"/v1/jobs/{job_id}/logs?{query}").raise_for_status().json()["data"]]

    messages_of_all = [line["message"] for line in everything]
    assert len(messages_of_all) >= 5
    assert found("tail=2") == messages_of_all[-2:]
    assert found("tail=1000") == messages_of_all
    assert found("tail=3&limit=1") == messages_of_all[-3:-2]
    assert found(f"tail=3&after={everything[-2]['seq']}") == messages_of_all[-1:]
    assert found("rank=0") == messages_of_all
    assert found("rank=1") == found("rank=1&tail=2") == found("attempt_id=att_none") == []
    assert found(f"attempt_id={everything[0]['attempt_id']}&tail=1") == messages_of_all[-1:]
    assert found("since=1970-01-01T00:00:00Z") == messages_of_all
    assert found("since=2999-01-01T00:00:00Z") == []


@ON_SQLITE
@pytest.mark.parametrize("query", ["tail=2", "rank=0", "attempt_id=att_1", "since=1970-01-01T00:00:00Z"])
def test_a_stream_of_some_log_lines_is_refused(client: TestClient, trained: tuple[str, Rank], query: str) -> None:
    response = client.get(f"/v1/jobs/{trained[0]}/logs?{query}", headers={"Accept": "text/event-stream"})
    assert response.status_code == 422
    assert f"a stream with {query.partition('=')[0]}" in response.text
    assert "Last-Event-ID" in response.text


@ON_SQLITE
@pytest.mark.parametrize(
    "query", ["tail=0", "rank=-1", "since=yesterday", "since=2026-01-01T00:00:00", "since=0001-01-01T00:00:00%2B14:00"]
)
def test_bad_wishes_for_log_lines_are_refused(client: TestClient, trained: tuple[str, Rank], query: str) -> None:
    assert client.get(f"/v1/jobs/{trained[0]}/logs?{query}").status_code == 422


def test_checkpoints_and_attempts(client: TestClient, trained: tuple[str, Rank]) -> None:
    job_id, rank = trained
    page = client.get(f"/v1/jobs/{job_id}/checkpoints?limit=1").json()
    assert [item["step"] for item in page["data"]] == [2]
    rest = client.get(f"/v1/jobs/{job_id}/checkpoints?after={page['last_id']}").json()
    assert [item["step"] for item in rest["data"]] == [3]
    attempts = client.get(f"/v1/jobs/{job_id}/attempts").json()["data"]
    assert [item["id"] for item in attempts] == [rank.order.attempt_id]
    assert attempts[0]["node"] == "node-1"
    assert client.get(f"/v1/jobs/{job_id}/attempts?after={rank.order.attempt_id}").json()["data"] == []


CURSORS = [
    ("checkpoints attempts", ("x", "%00", "ckpt_01kg9ys7g0zn9d2mqxrybeyjtc")),
    ("events logs metrics", ("-1", "x", "9" * 30)),
]


@ON_SQLITE
def test_a_cursor_that_names_nothing_or_is_no_number_is_refused(client: TestClient, trained: tuple[str, Rank]) -> None:
    for parts, cursors in CURSORS:
        for part, after in itertools.product(parts.split(), cursors):
            assert client.get(f"/v1/jobs/{trained[0]}/{part}?after={after}").status_code == 422, (part, after)


def messages(text: str) -> list[dict[str, Any]]:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    fields = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
    return [{**json.loads(each["data"]), "number": int(each["id"]), "name": each["event"]} for each in fields]


@ON_SQLITE
def test_a_stream_has_everything_and_ends_with_the_job(client: TestClient, trained: tuple[str, Rank]) -> None:
    job_id, rank = trained
    rank.succeed()
    headers = {"Accept": "text/event-stream"}
    for part, name in (("events", "event"), ("logs", "log_line")):
        response = client.get(f"/v1/jobs/{job_id}/{part}", headers=headers)
        assert response.headers["content-type"].startswith("text/event-stream")
        everything = messages(response.text)
        assert [each["number"] for each in everything] == list(range(1, len(everything) + 1))
        assert {each["name"] for each in everything} == {name}
        resumed = messages(client.get(f"/v1/jobs/{job_id}/{part}", headers=headers | {"Last-Event-ID": "3"}).text)
        assert resumed == everything[3:]


@ON_SQLITE
def test_a_stream_goes_on_while_the_job_runs(client: TestClient, trained: tuple[str, Rank]) -> None:
    """The last line arrives while the stream is open; the stream sends it and then ends."""
    job_id, rank = trained
    with client.stream("GET", f"/v1/jobs/{job_id}/logs", headers={"Accept": "text/event-stream"}) as response:
        rank.send(LogReport(level="INFO", message="the last words"))
        rank.succeed()
        text = "".join(response.iter_text())
    assert messages(text)[-1]["message"] == "the last words"


@ON_SQLITE
def test_a_stream_of_nothing_is_refused(client: TestClient) -> None:
    response = client.get("/v1/jobs/job_01kg9ys7g0zn9d2mqxrybeyjtc/events", headers={"Accept": "text/event-stream"})
    assert response.status_code == 404
