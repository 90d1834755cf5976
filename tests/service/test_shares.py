"""Tenants share a pool by turns and limits, and jobs borrow slots that the one ahead of them cannot use yet."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import DesiredState, PoolCapacity, PoolConfig, QueuePlace
from octet.api_schemas.resources import TenantConfig
from octet.service import store
from octet.service.app import create_app
from octet.service.cluster.fake import FakeLauncher
from octet.service.scheduling.places import QueuePlaces
from octet.service.settings import Settings
from tests.service.databases import ON_SQLITE
from tests.service.test_pause import last_event, stop_at
from tests.service.world import World

KEYS = {tenant: f"the api key of {tenant} here" for tenant in ("one", "two")}


POOL = PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=4, tenants={"one": TenantConfig(slots=3)})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, pools=(POOL,))


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher([POOL])


def place_of(world: World, job_id: str) -> QueuePlace:
    with world.database.read() as session:
        job = store.jobs.find_job(session, job_id)
        assert job is not None
        return QueuePlaces(world.database, world.settings).read(session, [job])[job_id]


def states(world: World, job_ids: list[str]) -> list[str]:
    return [world.job(job_id).state.value for job_id in job_ids]


@ON_SQLITE
def test_a_tenant_with_many_jobs_keeps_another_one_neither_from_slots_nor_from_sight(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads hold two jobs of each tenant, so that the second tenant's are far behind the head of the whole queue."""
    for name in ("HEAD_OF_QUEUE", "SHORTEST_HEAD"):
        monkeypatch.setattr(store.queue, name, 2)
    flood = [world.submit(tenant="one") for _ in range(20)]
    few = [world.submit(tenant="two") for _ in range(3)]
    with world.database.write() as session:
        store.queue.set_capacities(session, [PoolCapacity(pool="cpu", slots_present=4, nodes=())], world.clock.now())
    with world.database.read() as session:
        assert store.queue.tenants_waiting(session, "cpu") == ["one", "two"]
        assert [job.id for job in store.queue.head_of_queue(session, "cpu")] == [*flood[:2], *few[:2]]
    place = place_of(world, few[0])
    assert (place.position, place.why) == (2, "it fits and starts with the next pass of the dispatcher")
    world.dispatch()
    assert states(world, [*flood[:3], *few]) == ["starting", "starting", "queued", "starting", "starting", "queued"]


@ON_SQLITE
def test_a_limit_holds_until_slots_are_released(world: World) -> None:
    jobs = [world.submit(tenant="one", workers=2), world.submit(tenant="one", workers=2)]
    world.dispatch()
    assert states(world, jobs) == ["starting", "queued"]
    assert place_of(world, jobs[1]).why == "needs 2 slots; tenant 'one' has 2 of the 3 that it may take in pool 'cpu'"
    with world.database.read() as session:
        assert store.queue.use_by_tenant(session) == {"cpu": {"one": store.queue.Use(2, 1, world.clock.now())}}
    finish(world, jobs[0])
    world.dispatch()
    world.dispatch()
    assert states(world, jobs) == ["succeeded", "starting"]


@ON_SQLITE
def test_a_job_above_its_tenant_s_limit_is_refused_at_submission(
    world: World, tmp_path: Path, spec_document: dict[str, Any]
) -> None:
    keys = tuple(f"{tenant}:{key}" for tenant, key in KEYS.items())
    settings = Settings(data_dir=tmp_path, api_keys=keys, pools=world.settings.pools)
    document = spec_document | {"resources": {"pool": "cpu", "workers": 4}}
    document["training"] = document["training"] | {"global_batch_size": 16}
    with TestClient(create_app(settings, database=world.database), base_url="http://127.0.0.1:8000") as client:
        for tenant, status in (("one", 422), ("two", 201)):
            answer = client.post("/v1/jobs", json=document, headers={"Authorization": f"Bearer {KEYS[tenant]}"})
            assert answer.status_code == status, answer.text
            checked = client.post("/v1/jobs/validate", json=document, headers={"Authorization": f"Bearer {KEYS[tenant]}"})
            assert checked.status_code == (200 if status == 201 else 422)
            if status == 422:
                (error,) = answer.json()["errors"]
                assert (error["field"], error["got"]) == ("resources.workers", "4")
                assert error["allowed"] == "at most 3, the slots of pool 'cpu' that tenant 'one' may take"
        comparison = {"job": document, "levels": ["fp32", "O1"], "seeds": 2}
        answer = client.post("/v1/comparisons", json=comparison, headers={"Authorization": f"Bearer {KEYS['one']}"})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "job.resources.workers")


@ON_SQLITE
def test_a_job_borrows_slots_and_makes_way_for_the_one_ahead(world: World) -> None:
    running = world.submit(tenant="two", workers=3)
    world.dispatch()
    ahead, behind = world.submit(tenant="two", workers=4), world.submit(tenant="two", workers=1)
    world.dispatch()
    world.dispatch()
    assert states(world, [running, ahead, behind]) == ["starting", "queued", "starting"]
    assert "they are lent, until the job ahead of it can use them" in world.events(behind)[1].message
    rank = world.rank_of(behind)
    rank.begin()
    assert rank.train(1).desired is DesiredState.RUN
    finish(world, running)
    world.dispatch()
    assert rank.train(2).desired is DesiredState.YIELD
    assert last_event(world, behind)[:2] == (
        "job.yielding",
        "asked to make way after a checkpoint: the job ahead of it can use the slots that it was lent",
    )
    stop_at(rank, 2)
    world.dispatch()
    world.dispatch()
    assert states(world, [ahead, behind]) == ["starting", "queued"]
    assert world.job(behind).num_failures == 0
    finish(world, ahead)
    world.dispatch()
    world.dispatch()
    assert states(world, [behind]) == ["starting"]
    assert not world.attempts(behind)[-1].is_lent


def test_a_job_of_lower_priority_makes_way_where_the_pool_preempts(world: World) -> None:
    pool = POOL.model_copy(update={"preempts": True})
    world.context.settings = world.settings.model_copy(update={"pools": (pool,)})
    low, equal = world.submit(tenant="two", workers=2, priority=10), world.submit(tenant="two", workers=2)
    world.dispatch()
    world.dispatch()
    ranks = {job: world.rank_of(job) for job in (low, equal)}
    for rank in ranks.values():
        rank.begin()
    urgent = world.submit(tenant="two", workers=1)
    world.dispatch()
    assert [rank.train(1).desired for rank in ranks.values()] == [DesiredState.YIELD, DesiredState.RUN]
    assert last_event(world, low)[1] == "asked to make way after a checkpoint: a job of a higher priority needs its slots"
    stop_at(ranks[low], 1)
    world.dispatch()
    world.dispatch()
    assert states(world, [urgent, low, equal]) == ["starting", "queued", "running"]
    assert world.job(low).num_failures == 0
    finish(world, urgent)
    world.dispatch()
    world.dispatch()
    assert states(world, [low]) == ["starting"]


def test_a_loan_ends_once_nobody_waits_ahead(world: World) -> None:
    world.submit(tenant="two", workers=3)
    world.dispatch()
    ahead, behind = world.submit(tenant="two", workers=4), world.submit(tenant="two", workers=1)
    world.dispatch()
    assert world.attempts(behind)[-1].is_lent
    world.cancel(ahead)
    world.dispatch()
    assert not world.attempts(behind)[-1].is_lent
    large = world.submit(tenant="two", workers=1, priority=90)
    world.dispatch()
    assert states(world, [large, behind]) == ["queued", "starting"]


@ON_SQLITE
def test_a_pool_may_lend_nothing(world: World) -> None:
    pool = POOL.model_copy(update={"backfill": False})
    world.context.settings = world.settings.model_copy(update={"pools": (pool,)})
    world.submit(tenant="two", workers=3)
    world.dispatch()
    waiting = [world.submit(tenant="two", workers=4), world.submit(tenant="two", workers=1)]
    world.dispatch()
    assert states(world, waiting) == ["queued", "queued"]


def finish(world: World, job_id: str) -> None:
    rank = world.rank_of(job_id)
    rank.begin()
    rank.train(1, 2, 3, 4)
    rank.succeed()
