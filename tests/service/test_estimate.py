"""The estimate of a queued job's start: the pure functions as properties, and what the API shows."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event

from octet.service.scheduling.decide import Decision, PoolState, decide
from octet.service.scheduling.estimate import GRANULARITY_S, starts_at, starts_in_s
from octet.service.store.queue import Release, Use
from tests.service.test_decide import Job
from tests.service.world import World

NOW = datetime(2026, 1, 31, 12, 0, 3, tzinfo=UTC)
RELEASES = st.lists(st.builds(Release, st.integers(1, 8), st.none() | st.floats(0, 1e6)), max_size=12)
JOBS = st.lists(st.tuples(st.integers(1, 8), st.sampled_from((50, 90)), st.sampled_from(("one", "two"))), max_size=12)


def decided(jobs: list[tuple[int, int, str]], slots: int, used: int, *, backfills: bool = True) -> dict[str, Decision]:
    queue = [Job(f"{number:02}", workers, priority, tenant=tenant) for number, (workers, priority, tenant) in enumerate(jobs)]
    pool = PoolState("cpu", slots, slots, {"three": Use(used, 1)}, backfills=backfills)
    return {each.job_id: each for each in decide(queue, [pool], NOW, lease_grace_s=15)}


@given(st.integers(0, 40), RELEASES)
def test_it_is_the_first_moment_with_enough_slots_and_never_before_now(missing: int, releases: list[Release]) -> None:
    in_s = starts_in_s(missing, releases)
    known = [(each.in_s, each.slots) for each in releases if each.in_s is not None]
    if in_s is None:
        assert sum(slots for _, slots in known) < missing
        assert starts_at(missing, releases, NOW) is None
        return
    assert in_s >= 0
    assert sum(slots for end_s, slots in known if end_s <= in_s) >= missing
    assert in_s == 0 or sum(slots for end_s, slots in known if end_s < in_s) < missing
    at = starts_at(missing, releases, NOW)
    assert at is not None
    assert timedelta() <= at - NOW - timedelta(seconds=in_s) + timedelta(microseconds=1) <= timedelta(seconds=GRANULARITY_S + 1)


@given(st.integers(0, 40), st.integers(0, 40), RELEASES)
def test_fewer_slots_that_are_missing_are_never_there_later(missing: int, fewer: int, releases: list[Release]) -> None:
    later, sooner = starts_in_s(missing, releases), starts_in_s(max(0, missing - fewer), releases)
    assert later is None or (sooner is not None and sooner <= later)


@given(JOBS, st.integers(1, 16), st.integers(0, 16), st.integers(0, 16), RELEASES, st.booleans())
def test_more_free_slots_never_start_a_job_later(
    jobs: list[tuple[int, int, str]], slots: int, used: int, given_back: int, releases: list[Release], backfills: bool
) -> None:
    """But for jobs that borrow slots: the job ahead lends none any more once they bring it close to its start."""
    back = min(given_back, used)
    before = decided(jobs, slots, used, backfills=backfills)
    after = decided(jobs, slots, used - back, backfills=backfills)
    for job_id, one in before.items():
        other = after[job_id]
        if one.borrows:
            continue
        assert one.missing is not None
        assert other.missing is not None
        assert (one.missing == 0) == (one.why is None)
        earlier, later = starts_in_s(other.missing, releases), starts_in_s(one.missing, releases)
        assert later is None or (earlier is not None and earlier <= later)


@given(JOBS, st.integers(1, 16), st.integers(0, 16), RELEASES)
def test_jobs_behind_that_wait_start_no_earlier_than_those_ahead(
    jobs: list[tuple[int, int, str]], slots: int, used: int, releases: list[Release]
) -> None:
    waiting = [each for each in decided(jobs, slots, used, backfills=False).values() if each.why is not None]
    missing = [each.missing for each in waiting]
    assert all(number is not None and number >= 1 for number in missing)
    assert missing == sorted(missing, key=lambda number: number or 0)


def test_a_job_that_waits_for_something_else_has_no_estimate() -> None:
    jobs = [Job("a", not_before=NOW + timedelta(seconds=3)), Job("b", former_attempt_at_large=True), Job("c", 2)]
    pool = PoolState("cpu", 4, 4, {"default": Use(3, 1)})
    assert [each.missing for each in decide(jobs, [pool], NOW, 15)] == [None, None, 1]
    assert [each.missing for each in decide(jobs[2:], [PoolState("cpu", 4, None)], NOW, 15)] == [None]
    away = PoolState("cpu", 4, 2, {"default": Use(3, 1)})
    assert [each.missing for each in decide(jobs[2:], [away], NOW, 15)] == [3], "a slot that is away comes back to nobody"


def test_the_api_estimates_the_start_from_measured_steps(client: TestClient, world: World) -> None:
    _, first = world.start(name="first", steps=1000)
    world.start(name="not-measured", steps=1000)
    waiting, behind = world.submit(name="waits"), world.submit(name="behind", workers=2)

    def places() -> list[tuple[int, int, str | None]]:
        shown = [client.get(f"/v1/jobs/{job_id}").json()["queue"] for job_id in (waiting, behind)]
        rows = {row["id"]: row for row in client.get("/v1/rows").json()["data"]}
        for job_id, place in zip((waiting, behind), shown, strict=True):
            assert {name: rows[job_id].get(name) for name in place} == place
        return [(place["position"], place["missing_slots"], place["starts_at"]) for place in shown]

    assert places() == [(1, 1, None), (2, 3, None)], "nothing is measured yet"
    first.train(*range(1, 101))
    assert places() == [(1, 1, "2026-01-31T12:07:30.000000Z"), (2, 3, None)], "900 steps of half a second"
    world.clock.turn(200)
    assert places()[0] == (1, 1, "2026-01-31T12:07:30.000000Z")
    world.clock.turn(400)
    assert places()[0] == (1, 1, "2026-01-31T12:10:00.000000Z"), "never before now"
    first.train(*range(101, 1001))
    first.succeed()
    assert places()[0][1:] in [(1, "2026-01-31T12:10:00.000000Z"), (0, "2026-01-31T12:10:00.000000Z")]


def test_a_pool_that_gives_nothing_back_has_no_estimate() -> None:
    assert starts_in_s(1, []) is None
    assert starts_in_s(1, [Release(8, None)]) is None
    assert starts_in_s(2, [Release(1, 5.0), Release(8, None), Release(1, 3.0)]) == 5.0
    assert starts_at(0, [], NOW) == NOW.replace(second=10)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_waiting_job_is_shown_without_a_look_at_attempts_that_are_over(client: TestClient, world: World) -> None:
    """SQLite finds attempts by their id, or in the index of those that hold slots, which `EXPLAIN` shows."""
    for _ in range(2):
        job_id = world.submit(workers=2)
        world.dispatch()
    statements: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        statements.append((statement, parameters))

    event.listen(world.database._engine, "before_cursor_execute", note)
    assert client.get(f"/v1/jobs/{job_id}").json()["queue"]["missing_slots"] == 2
    event.remove(world.database._engine, "before_cursor_execute", note)
    looks = []
    with world.database.read() as session:
        for statement, parameters in statements:
            if "FROM attempts" in statement or "JOIN attempts" in statement:
                plan = session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
                looks += [row[3] for row in plan if " attempts " in f"{row[3]} "]
    assert len(looks) >= 2
    assert [look for look in looks if "ix_attempts_not_released" not in look and "(id=?)" not in look] == []
