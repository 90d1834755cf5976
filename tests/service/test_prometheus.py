"""The control plane for Prometheus: its ranks as targets, the last values of each job, and its own process."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event, text

from octet.api_schemas import (
    CheckpointReport,
    EvaluationReport,
    EventReport,
    ExporterReport,
    FailureReason,
    FinishedReport,
    StepReport,
)
from octet.service import store
from octet.service.app import create_app
from octet.service.db.tables import JobRow
from octet.service.settings import Settings
from octet.service.telemetry import jobs as job_telemetry
from tests.service.databases import ON_SQLITE
from tests.service.statements import counted
from tests.service.world import World

Values = dict[tuple[str, str], float]


def scrape(client: TestClient, job_id: str) -> Values:
    """The series of one job and those of no job, by name and by the last label that is not an id."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    values: Values = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            of_job = {"job_id", "tenant", "pool", "level"} if "job_id" in sample.labels else set()
            label = [value for name, value in sample.labels.items() if name not in of_job][-1:] or [""]
            if sample.labels.get("job_id", job_id) == job_id:
                values[sample.name, label[0]] = sample.value
    return values


def step(number: int) -> StepReport:
    return StepReport(step=number, loss=2.5, gradient_norm=1.5, learning_rate=0.1, tokens=100, step_time_s=0.5, data_wait_s=0.1)


def test_a_rank_is_a_target_while_its_attempt_lives(world: Any, client: TestClient) -> None:
    assert client.get("/internal/v1/prometheus/targets").json() == []
    job_id, rank = world.start()
    rank.send(ExporterReport(address="127.0.0.1:12345"))
    (attempt,) = world.attempts(job_id)
    (group,) = client.get("/internal/v1/prometheus/targets").json()
    assert group == {
        "targets": ["127.0.0.1:12345"],
        "labels": {"job": job_id, "attempt": attempt.id, "rank": "0", "pool": "cpu", "tenant": "default", "level": "fp32"},
    }
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.DATA_ERROR))
    assert client.get("/internal/v1/prometheus/targets").json() == []


def test_prometheus_is_sent_to_nodes_of_the_cluster_alone(world: World, client: TestClient) -> None:
    """The address of a cloud's metadata, another tenant's service or a name: what a rank says is no reason to ask there."""
    _, rank = world.start()
    world.launcher.nodes = ("10.0.0.7", "fd00::1")
    world.dispatch()
    listed = []
    for address in (
        "169.254.169.254:80",
        "10.0.0.71:80",
        "metadata.internal:80",
        "[fd00::2]:80",
        "10.0.0.7:9000",
        "[fd00::1]:9",
    ):
        rank.send(ExporterReport(address=address))
        listed += [target for group in client.get("/internal/v1/prometheus/targets").json() for target in group["targets"]]
    assert listed == ["10.0.0.7:9000", "[fd00::1]:9"]
    world.launcher.nodes = ()
    world.dispatch()
    assert client.get("/internal/v1/prometheus/targets").json() == []


@ON_SQLITE
@pytest.mark.parametrize(
    ("changes", "nodes"),
    [
        ({}, ("127.0.0.1",)),
        ({"host": "10.0.0.5", "api_keys": ("a key that is long enough",), "data_roots": ("/data",)}, ("127.0.0.1", "10.0.0.5")),
        ({"report_url": "http://octet-ingest:8001"}, ("127.0.0.1",)),
    ],
)
def test_ranks_on_loopback_are_also_at_the_server_s_own_address(
    world: World, tmp_path: Path, changes: dict[str, Any], nodes: tuple[str, ...]
) -> None:
    world.context.settings = Settings(data_dir=tmp_path, pools=world.settings.pools, **changes)
    world.dispatch()
    with world.database.read() as session:
        assert {pool.nodes for pool in store.queue.capacities(session)} == {nodes}


@ON_SQLITE
def test_a_job_is_its_tenants_from_the_key_to_the_series(
    world: World, openapi_document: dict[str, Any], spec_document: dict[str, Any], tmp_path: Path
) -> None:
    key = "a key that is long enough"
    keys = (f"research:{key}", "prometheus:the key of prometheus")
    settings = Settings(data_dir=tmp_path, api_keys=keys, pools=world.settings.pools)
    app = create_app(settings, database=world.database)
    app.openapi_schema = openapi_document
    with TestClient(app, headers={"Authorization": f"Bearer {key}"}) as client:
        job = client.post("/v1/jobs", json=spec_document).json()
        assert job["tenant"] == client.get(f"/v1/jobs/{job['id']}").json()["tenant"] == "research"
        world.dispatch()
        world.rank_of(job["id"]).send(ExporterReport(address="127.0.0.1:12345"))
        scraper = {"Authorization": "Bearer the key of prometheus"}
        (group,) = client.get("/internal/v1/prometheus/targets", headers=scraper).json()
        assert group["labels"]["tenant"] == "research"
        of_job = [line for line in client.get("/metrics", headers=scraper).text.splitlines() if job["id"] in line]
        assert len(of_job) > 5
        assert all('tenant="research"' in line for line in of_job)


@ON_SQLITE
def test_an_address_is_not_just_any_text(world: Any, client: TestClient) -> None:
    for address in ("127.0.0.1", "http://127.0.0.1:1", "a b:1", "127.0.0.1:123456", "x@y:80", "[::1]:80\n"):
        with pytest.raises(ValueError, match="address"):
            ExporterReport(address=address)
    assert ExporterReport(address="[fd00::1]:80")


@ON_SQLITE
def test_the_last_values_of_a_job_are_repeated(world: Any, client: TestClient) -> None:
    job_id, rank = world.start(labels={"comparison": "levels", "other": "not shown"})
    rank.send(step(1))
    rank.send(EvaluationReport(step=1, loss=2.25, tokens=10, metrics={"top1_accuracy": 0.25, "top5_accuracy": None}))
    rank.send(CheckpointReport(step=1, name="step_0000000001", num_bytes=5, sha256="0" * 64, loss=2.5))
    values = scrape(client, job_id)
    assert values["octet_job_info", "small"] == 1
    assert 'comparison="levels"' in client.get("/metrics").text
    assert values["octet_job_state", "running"] == 1
    assert values["octet_job_step", ""] == 1
    assert values["octet_job_loss", ""] == 2.5
    assert values["octet_job_evaluation_loss", ""] == 2.25
    assert values["octet_job_evaluation_perplexity", ""] == pytest.approx(9.4877, rel=1e-4)
    assert values["octet_job_evaluation_metric", "top1_accuracy"] == 0.25
    assert ("octet_job_evaluation_metric", "top5_accuracy") not in values  # it was not finite
    assert values["octet_job_gradient_norm", ""] == 1.5
    assert values["octet_job_tokens_per_second", ""] == 200
    assert values["octet_job_last_checkpoint_step", ""] == 1
    assert values["octet_job_last_report_timestamp_seconds", ""] == world.clock.now().timestamp()
    assert values["octet_attempt_leases", "held"] == 1
    assert "not shown" not in client.get("/metrics").text

    world.clock.turn(world.settings.lease_s + 1)
    values = scrape(client, job_id)
    assert values["octet_attempt_leases", "overdue"] == 1


@ON_SQLITE
def test_the_words_of_a_user_come_as_they_are(world: Any, client: TestClient) -> None:
    hostile = 'a "quote", a \\n that is no line feed, and a \\'
    world.start(name="shown", labels={"comparison": hostile})
    families = text_string_to_metric_families(client.get("/metrics").text)
    (info,) = [sample for family in families for sample in family.samples if sample.name == "octet_job_info"]
    assert info.labels["comparison"] == hostile


@ON_SQLITE
def test_the_rows_of_an_ended_job_are_read_once(world: World, client: TestClient) -> None:
    job_id, rank = world.start()
    rank.send(step(1))
    assert scrape(client, job_id)["octet_job_state", "running"] == 1
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.DATA_ERROR))
    with counted(world) as first:
        ended = scrape(client, job_id)
    with counted(world) as second:
        again = scrape(client, job_id)
    assert ended["octet_job_state", "failed"] == 1
    assert {key: value for key, value in again.items() if key[0] in job_telemetry.HELP} == {
        key: value for key, value in ended.items() if key[0] in job_telemetry.HELP
    }
    assert second["statements"] == first["statements"] - 6  # job, attempt, curve, evaluation, checkpoint, export

    live, rank = world.start()
    rank.send(step(1), step(2))
    assert scrape(client, live)["octet_job_step", ""] == 2
    rank.send(step(3))
    assert scrape(client, live)["octet_job_step", ""] == 3


@ON_SQLITE
def test_series_of_an_ended_job_go_away(world: Any, client: TestClient) -> None:
    job_id, rank = world.start()
    rank.send(step(1))
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.DATA_ERROR))
    values = scrape(client, job_id)
    assert values["octet_job_state", "failed"] == 1
    assert ("octet_job_last_report_timestamp_seconds", "") not in values
    world.clock.turn(job_telemetry.ENDED_SHOWN_FOR.total_seconds() + 1)
    assert job_id not in client.get("/metrics").text


@ON_SQLITE
def test_a_job_never_has_more_series_than_its_budget(world: Any, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, rank = world.start(labels={"comparison": "levels"})
    rank.send(step(1))
    whole = [line for line in client.get("/metrics").text.splitlines() if job_id in line]
    assert len(whole) <= job_telemetry.MAX_SERIES - 16  # room for evaluation, checkpoint, start phases, memory classes
    monkeypatch.setattr(job_telemetry, "MAX_SERIES", 5)
    for scrapes in (1, 2):
        text = client.get("/metrics").text
        assert len([line for line in text.splitlines() if job_id in line]) == 5
        assert f"octet_exporter_dropped_series_total {scrapes * (len(whole) - 5):.1f}" in text


@ON_SQLITE
def test_only_the_newest_jobs_have_series(world: Any, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = world.start()
    world.clock.turn(1)
    second, _ = world.start()
    monkeypatch.setattr(job_telemetry, "MAX_JOBS", 1)
    text = client.get("/metrics").text
    assert second in text
    assert first not in text
    assert "octet_jobs_hidden 1.0" in text


@ON_SQLITE
def test_the_queue_the_loop_and_the_database_are_seen(world: Any, client: TestClient) -> None:
    world.submit(workers=4)
    world.clock.turn(30)
    client.get("/healthz")
    values = scrape(client, "")
    assert values["octet_queue_oldest_wait_seconds", "cpu"] == 30
    assert values["octet_queue_oldest_wait_seconds", "h100"] == 0
    assert values["octet_database_size_bytes", ""] > 1000
    assert values["octet_database_transaction_duration_seconds_count", "write"] > 0
    assert values["octet_database_errors_total", "write"] == 0
    assert values["octet_exporter_dropped_series_total", ""] == 0


@ON_SQLITE
def test_an_event_of_a_rank_that_serves_nothing_is_kept(world: Any, client: TestClient) -> None:
    job_id, rank = world.start()
    rank.send(EventReport(type="exporter.failed", message="no way"))
    assert "exporter.failed" in [event.type for event in world.events(job_id)]


@pytest.mark.system
@ON_SQLITE
def test_a_scrape_reads_no_job_that_ended_long_ago(world: World, client: TestClient) -> None:
    """SQLite's steps, which grow with the rows that it reads, are as many behind a long history as behind a short one."""
    if not world.database.is_sqlite:
        pytest.skip("counts the steps of SQLite")
    job_id, rank = world.start()
    rank.train(1, 2)
    rank.succeed()
    world.clock.turn(2 * job_telemetry.ENDED_SHOWN_FOR.total_seconds())
    counted_steps: list[None] = []
    engine = world.database._engine

    def count(connection: Any, *_: Any) -> None:
        connection.set_progress_handler(lambda: counted_steps.append(None), 1)

    def num_steps() -> int:
        counted_steps.clear()
        assert client.get("/metrics").status_code == 200
        return len(counted_steps)

    event.listen(engine, "checkout", count)
    try:
        num_steps()
        before = num_steps()
        _copy_job(world, job_id, 500)
        assert before > 0
        assert num_steps() - before < 50
    finally:
        event.remove(engine, "checkout", count)


def _copy_job(world: World, job_id: str, num_copies: int) -> None:
    """Add copies of a job that are older than it."""
    with world.database.write() as session:
        names = [column.name for column in JobRow.__table__.columns]
        copied = ", ".join("'job_' || printf('%026d', i)" if name == "id" else name for name in names)
        copies = f"WITH RECURSIVE copies(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM copies WHERE i < {num_copies})"
        sql = f"{copies} INSERT INTO jobs ({', '.join(names)}) SELECT {copied} FROM jobs, copies WHERE id = :id"
        session.execute(text(sql), {"id": job_id})
