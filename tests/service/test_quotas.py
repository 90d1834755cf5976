"""Quotas of tenants: slot hours a month, and storage. Jobs wait for them and say why, and nothing is lost."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octet.api_schemas import CheckpointReport, DesiredState, JobState, PoolConfig
from octet.api_schemas.quotas import Quotas, TenantQuota
from octet.api_schemas.resources import TenantConfig
from octet.service import store
from octet.service.app import create_app
from octet.service.cluster.fake import FakeLauncher
from octet.service.db.tables import AttemptRow, CheckpointRow, DeletedUseRow
from octet.service.jobs.check_processes import CheckProcesses
from octet.service.scheduling.decide import PoolState, decide
from octet.service.scheduling.quotas import Storage, hours_reason, storage_reason, to_collect
from octet.service.settings import Settings
from octet.service.store.queue import Use
from octet.service.store.use import Kept, month_of
from tests.service.conftest import TestClient
from tests.service.databases import ON_SQLITE
from tests.service.invariants import check_invariants
from tests.service.test_decide import Job
from tests.service.test_pause import last_event, stop_at
from tests.service.test_shares import place_of
from tests.service.world import Rank, World, step

POOL = PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=4, tenants={"one": TenantConfig(slot_hours_per_month=10)})
KEPT_BYTES, DAY_S = 100, 86_400
NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
MOMENTS = st.datetimes(datetime(2025, 11, 1), datetime(2026, 3, 1), timezones=st.just(UTC))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    quotas = Quotas(tenants={"one": TenantQuota(storage_bytes=3 * KEPT_BYTES, retention_days=2)})
    return Settings(data_dir=tmp_path, pools=(POOL,), quotas=quotas, elastic_grow_after_s=DAY_S, stall_timeout_s=DAY_S)


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher([POOL])


def start(world: World, workers: int = 1, tenant: str = "one") -> tuple[str, Rank]:
    job_id = world.submit(workers=workers, tenant=tenant)
    world.dispatch()
    rank = world.rank_of(job_id)
    rank.begin()
    return job_id, rank


def hours(world: World) -> float:
    with world.database.read() as session:
        return store.use.hours_of_month(session, ["cpu"], world.clock.now()).get("cpu", {}).get("one", 0.0)


def pass_hours(world: World, rank: Rank, number: float) -> None:
    """Let hours pass in which the rank is heard each half minute."""
    for _ in range(round(number * 120)):
        world.clock.turn(30)
        rank.send()
    world.renew()


def save(rank: Rank, at_step: int) -> None:
    name = f"step_{at_step:010}"
    rank.send(step(at_step), CheckpointReport(step=at_step, name=name, num_bytes=KEPT_BYTES, sha256="a" * 64, loss=2.0))


def saved(world: World, job_id: str) -> list[str]:
    with world.database.read() as session:
        return [row.name for row in reversed(store.records.newest_checkpoints(session, job_id, 10))]


# The month's slot hours.


@ON_SQLITE
def test_a_tenant_without_slot_hours_waits_for_the_next_month_and_loses_nothing(world: World) -> None:
    job_id, rank = start(world, workers=4)
    other = world.submit(tenant="two")
    pass_hours(world, rank, 2.4)
    world.dispatch()
    assert rank.train(1).desired is DesiredState.RUN
    assert hours(world) == pytest.approx(9.6)
    pass_hours(world, rank, 0.2)
    world.dispatch()
    assert rank.train(2).desired is DesiredState.YIELD
    kind, message, *_ = last_event(world, job_id)
    assert kind == "job.yielding"
    why = (
        "tenant 'one' has taken 10.4 of the 10 slot hours that it may take in pool 'cpu' this month; "
        "the next month begins on 2026-02-01 (UTC)"
    )
    assert message.endswith(why)
    stop_at(rank, 2)
    later = world.submit(tenant="one")
    for _ in range(2):
        world.dispatch()
    assert [world.job(each).state for each in (job_id, later)] == [JobState.QUEUED] * 2
    assert world.job(job_id).num_failures == 0
    for each in (job_id, later):
        assert place_of(world, each).why == why
        assert place_of(world, each).missing_slots is None
    others_rank = world.rank_of(other)  # it holds nobody else back
    others_rank.begin()
    others_rank.succeed()
    world.turn((month_of(world.clock.now())[1] - world.clock.now()).total_seconds())
    world.dispatch()
    world.dispatch()
    again = world.rank_of(job_id)
    assert [checkpoint.step for checkpoint in again.order.checkpoints] == [2]
    assert hours(world) == 0


@ON_SQLITE
def test_what_deleted_jobs_have_taken_counts_until_the_month_is_over(world: World) -> None:
    job_id, rank = start(world, workers=2)
    pass_hours(world, rank, 0.5)
    rank.succeed()
    world.dispatch()
    world.delete(job_id)
    assert hours(world) == pytest.approx(1.0)
    world.tidy()
    assert hours(world) == pytest.approx(1.0)
    world.turn((month_of(world.clock.now())[1] - world.clock.now()).total_seconds() + 1)
    world.tidy()
    with world.database.read() as session:
        assert session.query(DeletedUseRow).count() == 0


def test_hours_are_those_within_the_month(world: World) -> None:
    """SQL adds up what the overlap of each attempt with the month is, in slots."""
    begin, _ = month_of(NOW)
    spans = [
        (begin - timedelta(hours=5), begin - timedelta(hours=1)),
        (begin - timedelta(hours=5), begin + timedelta(hours=2)),
        (begin + timedelta(hours=7), begin + timedelta(hours=8, minutes=15)),
        (NOW - timedelta(minutes=90), None),
        (begin - timedelta(days=40), begin - timedelta(days=39)),
    ]
    for number, (began, ended) in enumerate(spans):
        job_id = world.submit(tenant="one", workers=number % 2 + 1)
        with world.database.write() as session:
            job = store.jobs.find_job(session, job_id)
            assert job is not None
            state = "running" if ended is None else "succeeded"
            row = AttemptRow(id=f"att_{number:026}", job_id=job_id, epoch=1, state=state, pool="cpu", workers=job.workers)
            row.created_at, row.finished_at = began, ended
            session.add(row)
    with world.database.read() as session:
        found = store.use.hours_of_month(session, ["cpu"], NOW)
        none = store.use.hours_of_month(session, ["h100"], NOW)
    assert found["cpu"]["one"] == pytest.approx(2 * 2 + 1.25 * 1 + 1.5 * 2)
    assert none == {}


@given(MOMENTS)
def test_a_moment_is_in_its_month(moment: datetime) -> None:
    begin, end = month_of(moment)
    assert begin <= moment < end
    assert (begin.day, end.day, begin.hour, end.hour) == (1, 1, 0, 0)
    assert month_of(end)[0] == end
    assert month_of(end - timedelta(microseconds=1)) == (begin, end)


# Decisions.

TENANTS = ("one", "two", "three")


@given(
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 4)), max_size=12),
    st.dictionaries(st.sampled_from(TENANTS), st.floats(0, 20)),
    st.dictionaries(st.sampled_from(TENANTS), st.integers(0, 20)),
)
def test_a_tenant_over_its_quota_waits_and_the_others_run_as_if_it_had_no_jobs(
    asked: list[tuple[str, int]], taken: dict[str, float], stored: dict[str, int]
) -> None:
    jobs = [Job(f"{number:02}", workers, tenant=tenant) for number, (tenant, workers) in enumerate(asked)]
    pool = PoolState(
        "cpu",
        8,
        8,
        {tenant: Use(hours=each) for tenant, each in taken.items()},
        {tenant: TenantConfig(slot_hours_per_month=10) for tenant in TENANTS},
        storage={tenant: Storage(each, 10) for tenant, each in stored.items()},
    )
    over = {tenant for tenant in TENANTS if taken.get(tenant, 0) >= 10 or stored.get(tenant, 0) >= 10}
    decisions = {each.job_id: each for each in decide(jobs, [pool], NOW, 15)}
    waiting = [job for job in jobs if job.tenant in over]
    for job in waiting:
        why = decisions[job.id].why
        assert why is not None
        assert why in {
            hours_reason(job.tenant, "cpu", taken.get(job.tenant, 0), 10, NOW),
            storage_reason(job.tenant, pool.storage.get(job.tenant)),
        }
        assert not decisions[job.id].holds_back
    alone = {each.job_id: each for each in decide([job for job in jobs if job.tenant not in over], [pool], NOW, 15)}
    assert {job_id: decisions[job_id].workers for job_id in alone} == {job_id: each.workers for job_id, each in alone.items()}


KEPT = st.builds(Kept, st.just(CheckpointRow), st.just("job"), st.just("step"), st.integers(0, 50), st.just(NOW))


@given(st.lists(KEPT, max_size=8), st.integers(0, 400), st.integers(0, 400))
def test_no_more_is_deleted_than_has_to_be(kept: Sequence[Kept], others: int, most: int) -> None:
    used = others + sum(each.num_bytes for each in kept)
    chosen = to_collect(kept, used, TenantQuota(storage_bytes=most))
    assert chosen == list(kept[: len(chosen)])  # the first go first
    left = used - sum(each.num_bytes for each in chosen)
    assert left < most or len(chosen) == len(kept)
    if chosen:
        assert left + chosen[-1].num_bytes >= most


# Storage.


@ON_SQLITE
def test_a_tenant_with_full_storage_waits_until_it_deletes_something(world: World) -> None:
    job_id, rank = start(world)
    for number in (1, 2, 3):
        save(rank, number)
    waiting, other = world.submit(tenant="one"), world.submit(tenant="two")
    world.dispatch()
    assert [world.job(each).state for each in (job_id, waiting, other)] == ["running", "queued", "starting"]
    assert place_of(world, waiting).why.startswith(
        "checkpoints and exports of tenant 'one' take 300 B of 300 B, all that they may"
    )
    rank.succeed()
    world.dispatch()
    with world.database.write() as session:
        store.records.delete_saved(session, store.records.newest_checkpoints(session, job_id, 1)[0])
    world.dispatch()
    assert world.job(waiting).state is JobState.STARTING
    check_invariants(world)


def test_full_storage_frees_itself_of_what_retention_allows_and_of_nothing_else(world: World) -> None:
    ended, rank = start(world)
    save(rank, 1)
    save(rank, 2)
    rank.succeed()
    world.dispatch()
    live, live_rank = start(world)
    save(live_rank, 1)
    waiting = world.submit(tenant="one")
    world.tidy()  # the storage is full, and retention is not over
    world.dispatch()
    assert (saved(world, ended), world.job(waiting).state) == (["step_0000000001", "step_0000000002"], "queued")
    pass_hours(world, live_rank, 1)
    with world.database.write() as session:  # two days later
        job = store.jobs.lock_job(session, ended)
        assert job is not None
        assert job.finished_at is not None
        job.finished_at -= timedelta(days=2)
    world.tidy()
    assert saved(world, ended) == ["step_0000000002"]
    kind, message, *_ = last_event(world, ended)
    assert (kind, message) == (
        "checkpoint.deleted",
        "checkpoint step_0000000001 is deleted: its job is over for 2 days and the storage of tenant 'one' is full",
    )
    assert saved(world, live) == ["step_0000000001"]
    world.dispatch()
    assert world.job(waiting).state is JobState.STARTING
    world.tidy()
    assert saved(world, ended) == ["step_0000000002"]  # there is room again


KEYS = {"one": "the api key of one here", "two": "the api key of two here", "": "the operator's own key here"}


def test_use_is_shown_beside_its_limits_to_the_tenant_and_to_the_operator(
    world: World, tmp_path: Path, check_processes: CheckProcesses
) -> None:
    _, rank = start(world, workers=2)
    save(rank, 1)
    start(world, tenant="two")
    pass_hours(world, rank, 1.5)
    keys = tuple(f"{tenant}:{key}".removeprefix(":") for tenant, key in KEYS.items())
    settings = Settings(data_dir=tmp_path, pools=(POOL,), quotas=world.settings.quotas, api_keys=keys)
    with TestClient(
        create_app(settings, database=world.database, checks=check_processes), base_url="http://127.0.0.1:8000"
    ) as client:

        def ask(tenant: str) -> list[dict[str, Any]]:
            answer = client.get("/v1/usage", headers={"Authorization": f"Bearer {KEYS[tenant]}"})
            found: list[dict[str, Any]] = answer.json()["data"]
            return found

        (own,) = ask("one")
        assert own == {
            "object": "tenant_use",
            "tenant": "one",
            "month_ends_at": "2026-02-01T00:00:00.000000Z",
            "storage_bytes": KEPT_BYTES,
            "most_storage_bytes": 3 * KEPT_BYTES,
            "pools": [
                {
                    "pool": "cpu",
                    "slots": 2,
                    "most_slots": None,
                    "jobs": 1,
                    "most_jobs": None,
                    "slot_hours": pytest.approx(3.0),
                    "most_slot_hours": 10.0,
                }
            ],
        }
        (others,) = ask("two")
        assert (others["tenant"], others["most_storage_bytes"], others["pools"][0]["slot_hours"]) == (
            "two",
            None,
            pytest.approx(1.5),
        )
        assert ask("") == [own, others]
