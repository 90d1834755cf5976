"""The database: the schema is the one that was kept, transactions are atomic, times and text come back as they went in."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Dialect, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from octet.api_schemas import AttemptState
from octet.service import store
from octet.service.db import engine
from octet.service.db.engine import Database
from octet.service.db.migrate import known_revisions, statements
from octet.service.db.tables import AttemptRow
from octet.service.store.ids import is_id, new_id
from tests.service.databases import schema_file
from tests.service.invariants import check_invariants
from tests.service.world import World


@pytest.mark.parametrize("dialect", [sqlite.dialect(), postgresql.dialect()], ids=lambda dialect: dialect.name)
def test_the_schema_of_this_version_is_the_one_that_was_kept(dialect: Dialect) -> None:
    """A change of the tables needs a migration. `make snapshots` then keeps its schema, and never changes one that is kept."""
    path = schema_file(known_revisions()[-1], dialect.name)
    made = "".join(f"{' '.join(statement.split())}\n" for statement in statements(dialect))
    if os.environ.get("OCTET_UPDATE_SNAPSHOTS") and not path.exists():
        path.write_text(made)
    assert made == path.read_text()


def test_migrating_again_changes_nothing(database: Database) -> None:
    database.migrate()
    with database.read() as session:
        assert store.tallies.read(session).jobs == {}


def test_sqlite_is_set_up_to_lose_nothing(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/new/octet.db")
    database.migrate()
    with database.read() as session:
        names = ("journal_mode", "synchronous", "foreign_keys")
        found = [session.execute(text(f"PRAGMA {name}")).scalar() for name in names]
    database.close()
    assert found == ["wal", 2, 1]


def test_another_database_is_refused() -> None:
    with pytest.raises(ValueError, match="sqlite:///… or postgresql"):
        Database("mysql://root@localhost/octet")


def test_a_transaction_that_raises_leaves_nothing(world: World) -> None:
    job_id = world.submit()

    def fail() -> None:
        with world.database.write() as session:
            session.execute(text("UPDATE jobs SET name = 'changed'"))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert world.job(job_id).name == "small"


def test_one_live_attempt_per_job_is_a_rule_of_the_database(world: World) -> None:
    job_id, rank = world.start()
    second = AttemptRow(
        id=new_id("att", world.clock.now()),
        job_id=job_id,
        epoch=2,
        state=AttemptState.RESERVED,
        pool="cpu",
        workers=1,
        created_at=world.clock.now(),
    )

    def add() -> None:
        with world.database.write() as session:
            session.add(second)

    with pytest.raises(IntegrityError):
        add()
    assert [attempt.id for attempt in world.attempts(job_id)] == [rank.order.attempt_id]


def test_moments_are_utc_on_both(world: World) -> None:
    east = timezone(timedelta(hours=9))
    world.clock.moment = datetime(2026, 3, 1, 8, 30, 0, 123456, tzinfo=east)
    created = world.job(world.submit()).created_at
    assert created == world.clock.moment
    assert created.utcoffset() == timedelta(0)


def test_writers_take_turns(world: World) -> None:
    """Many threads write events of one job at once, and their numbers have no gaps: each waits for the one before."""
    job_id = world.submit()

    def write(_: int) -> None:
        with world.database.write() as session:
            job = store.jobs.lock_job(session, job_id)
            assert job is not None
            store.jobs.add_event(session, job, world.clock.now(), "test.written", "by a thread")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(80)))
    assert len(world.events(job_id)) == 81
    check_invariants(world)


def test_ids_sort_by_time_and_have_a_form() -> None:
    early = datetime(2026, 1, 1, tzinfo=UTC)
    ids = [new_id("job", early + timedelta(milliseconds=number)) for number in range(50)]
    assert ids == sorted(ids)
    assert all(is_id("job", each) for each in ids)
    assert not is_id("att", ids[0])
    assert not is_id("job", "job_../../../../etc/passwd0000")
    assert not is_id("job", ids[0] + "\n")


def test_an_id_sorts_after_the_one_it_follows_whatever_the_clock_says() -> None:
    ids = [new_id("job", datetime(2026, 1, 1, 12, tzinfo=UTC))]
    for hour in (11, 12, 10, 10, 13):
        ids.append(new_id("job", datetime(2026, 1, 1, hour, tzinfo=UTC), after=ids[-1]))
    assert ids == sorted(set(ids))
    assert all(is_id("job", each) for each in ids)
    last_of_a_millisecond = "job_01kdwy1t00" + 16 * "z"
    assert last_of_a_millisecond < new_id("job", datetime(2000, 1, 1, tzinfo=UTC), after=last_of_a_millisecond)


def test_jobs_keep_their_order_when_the_clock_is_set_back(world: World) -> None:
    """In the queue the older job is first, and in pages the newer one, also after a restart: the last id is in the database."""
    earlier = [world.submit(workers=2), world.submit(workers=2)]
    world.clock.turn(-3600)
    later = [world.submit(workers=2), world.submit(workers=2)]
    expected = [*earlier, *later]
    assert [job.id for job in world.all_jobs()] == expected[::-1]
    with world.database.read() as session:
        rows = [row for row in map(partial(store.jobs.find_job, session), expected) if row is not None]
        assert store.queue.positions(session, rows, {"cpu": 4}) == {
            job_id: place for place, job_id in enumerate(expected, start=1)
        }
        assert [job.id for job in store.queue.head_of_queue(session, "cpu")] == expected


def test_postgres_time_is_the_server_s(database_url: str) -> None:
    database = Database(database_url)
    with database.read() as session:
        here = datetime.now(UTC)
        assert abs((database.now(session) - here).total_seconds()) < 60
    database.close()


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_connection_that_was_lost_while_idle_is_replaced(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_IDLE_S", 0.0)
    own, other = Database(database_url), Database(database_url)
    with own.read() as session:
        pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with other.write() as session:
        assert session.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid}).scalar_one()
    with own.read() as session:
        assert session.execute(text("SELECT pg_backend_pid()")).scalar_one() != pid
    own.close()
    other.close()
