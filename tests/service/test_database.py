"""The database: migrations match the tables, transactions are atomic, times and text come back as they went in."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import IntegrityError

from octet.api_schemas import AttemptState
from octet.service import store
from octet.service.db import engine
from octet.service.db.engine import Database
from octet.service.db.migrate import upgrade
from octet.service.db.tables import AttemptRow, Base
from octet.service.store.ids import is_id, new_id
from octet.service.store.jobs import TakenKey
from tests.service.invariants import check_invariants, check_tallies
from tests.service.world import World

TALLIED = ("jobs", "attempts", "pool_capacities")


def test_the_migrations_make_the_tables_that_the_code_has(database: Database) -> None:
    with database.read() as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_a_job_from_before_there_were_tenants_is_the_default_ones(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/octet.db")
    with engine.begin() as connection:
        upgrade(connection, "0002")
        columns = "id, name, state, desired, pool, workers, priority, spec, created_at, queued_at"
        rest = "num_attempts, num_failures, num_platform_failures, last_event_seq, last_log_seq"
        values = "'job_1', 'old', 'succeeded', 'run', 'cpu', 1, 50, '{}', '2026-01-01', '2026-01-01', 1, 0, 0, 0, 0"
        connection.execute(text(f"INSERT INTO jobs ({columns}, {rest}) VALUES ({values})"))
        upgrade(connection)
        assert connection.execute(text("SELECT id, tenant FROM jobs")).all() == [("job_1", "default")]
    engine.dispose()


def test_an_idempotency_key_from_before_belongs_to_the_tenant_of_its_job(database: Database, world: World) -> None:
    job_id = world.submit()
    with database.write() as session:
        connection = session.connection()
        connection.execute(text("UPDATE jobs SET tenant = 'research'"))
        connection.execute(text("DROP TABLE idempotency_keys"))
        connection.execute(
            text(
                "CREATE TABLE idempotency_keys (key VARCHAR(255) NOT NULL, body_hash VARCHAR(64) NOT NULL, job_id VARCHAR(31) "
                "NOT NULL, expires_at TIMESTAMP NOT NULL, CONSTRAINT pk_idempotency_keys PRIMARY KEY (key))"
            )
        )
        connection.execute(text("CREATE INDEX ix_idempotency_keys_expires_at ON idempotency_keys (expires_at)"))
        row = {"job_id": job_id, "at": "2026-02-01 12:00:00"}
        connection.execute(text("INSERT INTO idempotency_keys VALUES ('used', 'hash', :job_id, :at)"), row)
        for index in ("ix_jobs_live", "ix_jobs_finished_at", "ix_jobs_pool_queued_at", "ix_attempts_state_reason"):
            connection.execute(text(f"DROP INDEX {index}"))
        without_tallies(connection)
        without_rows(connection)
        connection.execute(text("ALTER TABLE attempts DROP COLUMN warmed_up_at"))
        connection.execute(text("ALTER TABLE jobs DROP COLUMN steps"))
        connection.execute(text("ALTER TABLE jobs DROP COLUMN min_workers"))
        without_curve_parts(connection)
        connection.execute(text("ALTER TABLE metrics DROP COLUMN evaluation_metrics"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0003'"))
    database.migrate()
    with database.write() as session:
        check_tallies(session)
        now = world.clock.now()
        assert store.jobs.find_idempotency_key(session, "default", "used", now) is None
        found = store.jobs.find_idempotency_key(session, "research", "used", now)
        assert found is not None
        assert found.job_id == job_id
        key = TakenKey("other", "used", "hash", job_id, now + timedelta(hours=24))
        assert store.jobs.take_idempotency_keys(session, [key], now) == {job_id}


PLANNED = ("plan", "measured_to_planned", "failures", "traceparent", "step_time_to_planned")


def without_rows(connection: Connection) -> None:
    """Undo migrations 0024, 0023, 0022, 0021, 0020, 0019, 0018, 0017, 0016, 0015, 0014, 0013 and 0012."""
    connection.execute(text("DROP INDEX ix_jobs_queue_of_tenant"))
    connection.execute(text("DROP INDEX ix_attempts_finished_at_pool"))
    for table in ("deleted_uses", "deleted_files", "last_starts", "api_keys", "audit_records"):
        connection.execute(text(f"DROP TABLE {table}"))
    for name in ("num_events", "is_lent"):
        connection.execute(text(f"ALTER TABLE attempts DROP COLUMN {name}"))
    for statement in ("DROP INDEX ix_jobs_pool_measured", *(f"ALTER TABLE jobs DROP COLUMN {name}" for name in PLANNED)):
        connection.execute(text(statement))
    for table in ("exports", "comparison_children", "comparisons", "deleted_jobs"):
        connection.execute(text(f"DROP TABLE {table}"))
    undo = ("DROP TABLE measurements", "DROP INDEX ix_jobs_rows", "DROP INDEX ix_jobs_best_evaluation_loss")
    for statement in (*undo, "ALTER TABLE jobs DROP COLUMN level", "ALTER TABLE jobs DROP COLUMN best_evaluation_loss"):
        connection.execute(text(statement))


def without_curve_parts(connection: Connection) -> None:
    """Undo migration 0010, as far as the table goes."""
    for table in ("curve_parts", "evaluations"):
        connection.execute(text(f"DROP TABLE {table}"))
    moment, number = ("TIMESTAMPTZ", "FLOAT8") if connection.dialect.name == "postgresql" else ("DATETIME", "DOUBLE")
    numbers = (
        "loss",
        "gradient_norm",
        "learning_rate NOT NULL",
        "step_time_s NOT NULL",
        "data_wait_s NOT NULL",
        "evaluation_loss",
    )
    typed = [f"{name} {number} {rest}".strip() for name, _, rest in (each.partition(" ") for each in numbers)]
    connection.execute(
        text(
            "CREATE TABLE metrics (job_id VARCHAR(31) NOT NULL REFERENCES jobs (id), step BIGINT NOT NULL, "
            f"at {moment} NOT NULL, attempt_id VARCHAR(31) NOT NULL, tokens BIGINT NOT NULL, {', '.join(typed)}, "
            "evaluation_metrics JSON, CONSTRAINT pk_metrics PRIMARY KEY (job_id, step))"
        )
    )


def without_tallies(connection: Connection) -> None:
    """Undo migration 0007."""
    connection.execute(text("DROP TABLE tallies"))
    names = [f"tally_{table}_{event}" for table in TALLIED for event in ("insert", "update", "delete")]
    if connection.dialect.name == "postgresql":
        connection.execute(text("DROP FUNCTION tally_add"))
        undo = [f"DROP FUNCTION {name} CASCADE" for name in names]
    else:
        undo = [f"DROP TRIGGER {name}" for name in names]
    for statement in undo:
        connection.execute(text(statement))


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
