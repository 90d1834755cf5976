"""A full disk: the jobs wait for space without being blamed, and the database refuses without losing anything."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from octet.api_schemas import FailureReason, FinishedReport, JobState
from octet.service.app import create_app
from octet.service.db.engine import Database
from octet.service.settings import Settings
from tests.kit.small_disk import SmallDisk, small_disk
from tests.service.conftest import POOLS, TestClient
from tests.service.world import Rank, World

MORE_THAN_THERE_IS = 1 << 60
FULL = FinishedReport(outcome="failed", reason=FailureReason.STORAGE_FULL, message="the checkpoint of step 2 does not fit")


def find_full(world: World, rank: Rank) -> None:
    """Let the rank fail with a full disk, and let the longest back-off pass."""
    rank.send(FULL)
    world.dispatch()
    world.turn(60)
    world.dispatch()


def test_a_job_waits_for_space_without_end_and_without_blame(world: World, client: TestClient) -> None:
    world.settings.data_dir.mkdir()
    world.settings = world.context.settings = world.settings.model_copy(update={"free_space_bytes": 0})
    job_id, rank = world.start(max_failures=0)
    for _ in range(12):
        find_full(world, rank)
        assert world.job(job_id).state is JobState.STARTING
        rank = world.rank_of(job_id)
        rank.begin()
    rank.succeed()
    assert world.job(job_id).state is JobState.SUCCEEDED
    (event, *_) = [event for event in world.events(job_id) if event.type == "job.queued"]
    assert "tried again once there is space" in event.message
    assert FailureReason.STORAGE_FULL.hint in event.message


def test_it_is_not_tried_before_the_margin_is_free(world: World) -> None:
    world.settings.data_dir.mkdir()
    world.context.settings = world.settings.model_copy(update={"free_space_bytes": MORE_THAN_THERE_IS})
    job_id, rank = world.start()
    find_full(world, rank)
    other, _ = world.start(name="other")
    assert (world.job(job_id).state, world.job(job_id).num_attempts) == (JobState.QUEUED, 1)
    assert world.job(other).state is JobState.RUNNING, "the others are not held back"
    world.context.settings = world.settings.model_copy(update={"free_space_bytes": 0})
    world.dispatch()
    assert world.job(job_id).num_attempts == 2


def test_other_failures_of_the_platform_keep_their_limit(world: World) -> None:
    world.context.settings = world.settings.model_copy(update={"free_space_bytes": 0})
    job_id, rank = world.start()
    find_full(world, rank)
    for _ in range(4):
        assert world.job(job_id).state is JobState.STARTING
        rank = world.rank_of(job_id)
        rank.begin()
        rank.send(FinishedReport(outcome="failed", reason=FailureReason.WRONG_NODE))
        world.dispatch()
        world.turn(60)
        world.dispatch()
    assert world.job(job_id).state is JobState.FAILED


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        yield disk


def test_a_database_on_a_full_disk_refuses_and_keeps_what_it_accepted(
    disk: SmallDisk, openapi_document: dict[str, Any], spec_document: dict[str, Any]
) -> None:
    database = Database(f"sqlite:///{disk.path / 'octet.db'}")
    app = create_app(Settings(data_dir=disk.path, pools=POOLS), database=database)
    app.openapi_schema = openapi_document
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        accepted = [client.post("/v1/jobs", json=spec_document).json()["id"]]
        disk.fill()
        # The write-ahead log has some room of its own, so the first jobs may still be accepted.
        answers = [client.post("/v1/jobs", json=spec_document | {"labels": {"many": "x" * 200}}) for _ in range(40)]
        accepted += [answer.json()["id"] for answer in answers if answer.status_code == 201]
        refused = [answer for answer in answers if answer.status_code != 201]
        assert {answer.status_code for answer in refused} == {503}
        assert "disk is full" in refused[0].json()["detail"]
        assert int(refused[0].headers["Retry-After"]) > 0
        assert client.get("/v1/jobs", params={"limit": 100}).status_code == 200, "what is there can be read"
        disk.free()
        accepted.append(client.post("/v1/jobs", json=spec_document).json()["id"])
        listed = client.get("/v1/jobs", params={"limit": 100}).json()["data"]
    assert sorted(job["id"] for job in listed) == sorted(accepted)
    with database.read() as session:
        assert session.execute(text("PRAGMA integrity_check")).scalar() == "ok"
    database.close()
