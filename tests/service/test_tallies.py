"""Counts that triggers keep: true after whatever is written, by however many at once, and a version that every change moves."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from octet.api_schemas import FailureReason, FinishedReport, JobState
from octet.service import store
from octet.service.db.engine import Database
from octet.service.store.tallies import Tallies
from tests.service.invariants import check_tallies
from tests.service.world import World


def tallies(world: World) -> Tallies:
    with world.database.read() as session:
        check_tallies(session)
        return store.tallies.read(session)


def test_every_change_of_the_queue_has_a_version_of_its_own(world: World) -> None:
    def lives() -> Iterator[str]:
        yield "nothing"
        job_id, rank = world.start(max_failures=1)
        yield "a job runs"
        world.submit()
        yield "another waits"
        rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_LOST, message="gone"))
        yield "the first backs off"
        world.dispatch()
        yield "its slot is free"
        world.launcher.slots_present["cpu"] = 7
        world.dispatch()
        yield "the pool has other slots"
        world.cancel(job_id)
        yield "the first is cancelled"

    versions = [tallies(world).version for _ in lives()]
    assert versions == sorted(set(versions))
    assert tallies(world).jobs["cpu", JobState.CANCELLED] == 1


def test_a_heartbeat_is_no_change(world: World) -> None:
    _, rank = world.start()
    before = tallies(world).version
    rank.send()
    assert tallies(world).version == before


def test_rows_written_by_sql_are_counted(world: World) -> None:
    world.submit()
    with world.database.write() as session:
        session.execute(text("UPDATE jobs SET state = 'failed', pool = 'other'"))
    assert tallies(world).jobs == {("other", JobState.FAILED): 1}
    with world.database.write() as session:
        session.execute(text("DELETE FROM job_labels"))
        session.execute(text("DELETE FROM events"))
        session.execute(text("DELETE FROM jobs"))
    assert tallies(world).jobs == {}


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_writers_of_the_same_tallies_do_not_wait_for_each_other(world: World) -> None:
    ids = [world.submit() for _ in range(2)]
    both_have_written = threading.Barrier(2)

    def place(job_id: str) -> None:
        with world.database.write() as session:
            job = store.jobs.lock_job(session, job_id)
            assert job is not None
            job.state = JobState.STARTING
            session.flush()
            both_have_written.wait(10)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(place, ids))
    assert tallies(world).jobs == {("cpu", JobState.STARTING): 2}


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_what_ended_connections_counted_is_gathered(world: World, database_url: str) -> None:
    other = Database(database_url, world.clock)
    with other.write() as session:
        pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        world.submit()
        session.execute(text("INSERT INTO pool_capacities VALUES ('cpu', 3, now())"))
    other.close()
    before = tallies(world)
    with world.database.write() as session:
        store.tallies.gather(session)
        parts = set(session.scalars(text("SELECT part FROM tallies")))
    assert pid not in parts
    assert 0 in parts
    assert tallies(world) == before
