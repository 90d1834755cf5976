"""A backup is one consistent state, made beside writers; it restores whole or not at all, into either kind of database."""

import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, MetaData, create_engine, insert, inspect, make_url, select, text
from sqlalchemy.pool import NullPool

from octet.api_schemas import LogReport
from octet.service.db import migrate
from octet.service.db.backup import back_up, restore
from octet.service.db.engine import Database
from octet.service.db.migrate import NewerSchema, known_revisions
from octet.service.db.tables import Base
from tests.service.conftest import POOLS
from tests.service.databases import DATABASES, ON_SQLITE, schema_file
from tests.service.invariants import check_invariants, check_tallies
from tests.service.test_delete import finish
from tests.service.world import TurnedClock, World

NEW_DATABASE = "restored"


@pytest.fixture
def tmp_path(fast_dir: Path) -> Iterator[Path]:
    """A folder in memory: a new database takes a flush for each table."""
    with tempfile.TemporaryDirectory(dir=fast_dir) as folder:
        yield Path(folder)


@pytest.fixture(params=DATABASES)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of each kind in which nothing is yet, not even tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'restored' / 'octet.db'}"
        return
    url = make_url(request.getfixturevalue("postgres_url")).set(drivername="postgresql+psycopg")
    engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {NEW_DATABASE}"))
    yield url.set(drivername="postgresql", database=NEW_DATABASE).render_as_string(hide_password=False)
    with engine.connect() as connection:
        connection.execute(text(f"DROP DATABASE {NEW_DATABASE}"))


@pytest.fixture
def emptied(empty_url: str, clock: TurnedClock) -> Iterator[Database]:
    database = Database(empty_url, clock)
    yield database
    database.close()


def rows_of(database: Database) -> dict[str, list[Any]]:
    with database.read() as session:
        return {table.name: sorted(map(repr, session.execute(select(table)))) for table in Base.metadata.sorted_tables}


def test_every_row_comes_back_in_either_kind_of_database(world: World, emptied: Database, tmp_path: Path) -> None:
    finish(world)
    deleted, _ = finish(world, name="deleted")
    world.delete(deleted)
    _, rank = world.start(name="trains", key="a-key")
    rank.send(LogReport(level="INFO", message="zero \0 byte, ' \" \\ and \N{SNOWMAN}"))
    rank.train(1, 2, 3)
    num_rows = back_up(world.database, tmp_path / "copy.db")
    assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600
    assert restore(tmp_path / "copy.db", emptied) == num_rows
    before, after = rows_of(world.database), rows_of(emptied)
    assert {name: len(rows) for name, rows in after.items()} == {name: len(rows) for name, rows in before.items()}
    assert after == before
    filled = {name for name, rows in after.items() if rows}
    assert filled >= {"jobs", "job_labels", "attempts", "events", "curve_parts", "evaluations", "checkpoints", "log_lines"}
    assert filled >= {"idempotency_keys", "deleted_jobs", "leases", "tallies"}
    with emptied.write() as session:
        check_tallies(session)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["copy.db"]


@ON_SQLITE
def test_a_job_that_ran_goes_on_after_a_restore(world: World, emptied: Database, tmp_path: Path) -> None:
    job_id, rank = world.start(name="trains", max_failures=1)
    rank.train(1, 2)
    back_up(world.database, tmp_path / "copy.db")
    rank.train(3)
    restore(tmp_path / "copy.db", emptied)
    restored = World(emptied, world.clock, world.settings, world.launcher, world.spec, leads=False)
    restored.restart()
    assert restored.attempts(job_id)[0].last_step == 2
    restored.turn(world.settings.lease_s + world.settings.lease_grace_s + 1)
    restored.launcher.lose_everything()
    for _ in range(3):
        restored.dispatch()
        restored.turn(restored.settings.lease_grace_s)
    assert len(restored.attempts(job_id)) == 2
    restored.rank_of(job_id).begin()
    check_invariants(restored)


@pytest.mark.parametrize("empty_url", ["sqlite"], indirect=True)
def test_a_backup_beside_writers_is_one_state(world: World, emptied: Database, tmp_path: Path) -> None:
    finish(world)
    is_over = threading.Event()
    num_written = 0

    def write() -> None:
        nonlocal num_written
        while not is_over.is_set():
            world.submit()
            num_written += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            back_up(world.database, tmp_path / f"copy-{number}.db")
    finally:
        is_over.set()
        writer.join()
    assert num_written > 0
    restore(tmp_path / "copy-4.db", emptied)
    with emptied.write() as session:
        check_tallies(session)
    restored = World(emptied, world.clock, world.settings, world.launcher, world.spec, leads=False)
    check_invariants(restored)


def test_a_file_that_is_there_is_not_overwritten(database: Database, tmp_path: Path) -> None:
    (tmp_path / "copy.db").write_text("mine")
    with pytest.raises(FileExistsError, match="Name a file that does not exist yet"):
        back_up(database, tmp_path / "copy.db")
    assert (tmp_path / "copy.db").read_text() == "mine"


def test_a_folder_without_a_database_is_named_and_stays_empty(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no database .*--data-dir"):
        back_up(Database(f"sqlite:///{tmp_path}/none.db"), tmp_path / "copy.db")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(database: Database, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*/none. Make it"):
        back_up(database, tmp_path / "none" / "copy.db")


def test_a_database_that_has_rows_keeps_them(world: World, tmp_path: Path) -> None:
    world.submit()
    back_up(world.database, tmp_path / "copy.db")
    world.submit()
    before = rows_of(world.database)
    with pytest.raises(ValueError, match=r"has rows in jobs, .*Restore into an empty"):
        restore(tmp_path / "copy.db", world.database)
    assert rows_of(world.database) == before


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to have a header" * 20])
def test_a_file_that_is_no_backup_is_refused(content: bytes, emptied: Database, tmp_path: Path) -> None:
    (tmp_path / "copy.db").write_bytes(content)
    with pytest.raises(ValueError, match=r"copy.db is no backup: .*Name a file that `octet backup` has written"):
        restore(tmp_path / "copy.db", emptied)
    assert (tmp_path / "copy.db").read_bytes() == content


@ON_SQLITE
def test_a_damaged_backup_fills_nothing(world: World, emptied: Database, tmp_path: Path) -> None:
    """An attempt of a job that is not there is met after the first rows were written."""
    world.start()
    back_up(world.database, tmp_path / "copy.db")
    with sqlite3.connect(tmp_path / "copy.db") as damaged:
        damaged.execute("UPDATE attempts SET job_id = 'job_00000000000000000000000000'")
    damaged.close()
    with pytest.raises(ValueError, match=r"(?is)copy.db is damaged: .*foreign key.* Nothing was restored"):
        restore(tmp_path / "copy.db", emptied)
    assert not any(rows for name, rows in rows_of(emptied).items() if name != "tallies")


@ON_SQLITE
def test_schemas_of_other_versions(
    database: Database, emptied: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up(database, tmp_path / "copy.db")
    for version, refusal, words in OTHER_SCHEMAS:
        with sqlite3.connect(tmp_path / "copy.db") as other:
            other.execute("UPDATE alembic_version SET version_num = ?", [version])
        other.close()
        with pytest.raises(refusal, match=words):
            restore(tmp_path / "copy.db", emptied)
    with_next_migration(monkeypatch, tmp_path, "pass")
    with pytest.raises(ValueError, match=r"Back it up with the version whose server uses it"):
        back_up(database, tmp_path / "of-older.db")
    assert not (tmp_path / "of-older.db").exists()


OTHER_SCHEMAS = (
    ("9999", NewerSchema, "Start that version here too"),
    ("0023", RuntimeError, "from before the first release, and .* knows schemas from '0024'. Begin with a new database"),
)


def with_next_migration(monkeypatch: pytest.MonkeyPatch, folder: Path, does: str) -> None:
    """Give this version one migration more."""
    migrations = folder / "migrations"
    shutil.copytree(migrate.MIGRATIONS, migrations, dirs_exist_ok=True)
    (migrations / "versions" / "9998_next.py").write_text(
        f"from alembic import op\nimport sqlalchemy as sa\nrevision, down_revision = '9998', {known_revisions()[-1]!r}\n"
        f"branch_labels = depends_on = None\ndef upgrade():\n    {does}\n"
    )
    monkeypatch.setattr(migrate, "MIGRATIONS", migrations)


ADD_A_COLUMN = "op.add_column('jobs', sa.Column('added', sa.Integer()))"


def test_a_migration_that_fails_leaves_the_schema_and_the_next_start_begins_it_again(
    emptied: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_made_by_the_release(emptied, known_revisions()[0])
    for does, error in ((f"{ADD_A_COLUMN}; 1 / 0", ZeroDivisionError), (ADD_A_COLUMN, None)):
        with monkeypatch.context() as patch, nullcontext() if error is None else pytest.raises(error):
            with_next_migration(patch, tmp_path, does)
            emptied.migrate()
        with emptied.read() as session:
            names = {column["name"] for column in inspect(session.connection()).get_columns("jobs")}
            found = session.scalar(text("SELECT version_num FROM alembic_version"))
        assert (found, "added" in names) == ((known_revisions()[0], False) if error else ("9998", True))


@pytest.mark.parametrize("revision", known_revisions())
def test_each_schema_that_was_kept_comes_to_this_one(revision: str, emptied: Database) -> None:
    as_made_by_the_release(emptied, revision)
    emptied.migrate()
    with emptied.read() as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def as_made_by_the_release(database: Database, revision: str) -> None:
    if database.path is not None:
        database.path.parent.mkdir()
    with database.write() as session:
        make_schema(session.connection(), revision)


def make_schema(connection: Connection, revision: str) -> None:
    """Make a database as the release with this schema did."""
    for statement in schema_file(revision, connection.dialect.name).read_text().splitlines():
        connection.exec_driver_sql(statement)


def one_row(table: Any) -> dict[str, Any]:
    """Return a row of a table that was read from the database, with a plain value for each kind of column."""
    known = {"state": "running", "desired": "run", "reason": "stalled", "pool": POOLS[0].name, "role": "viewer"}
    texts = {"JSON": "{}", "DATETIME": "2026-01-01 00:00:00", "BLOB": b"", "BOOLEAN": 0}
    values = {}
    for column in table.columns:
        kind = str(column.type).partition("(")[0]
        value = texts.get(kind, f"{column.name}_1"[:10] if kind in {"VARCHAR", "TEXT"} else 1)
        values[column.name] = known.get(column.name, value)
    links = {next(iter(column.foreign_keys)).column.table.name: column.name for column in table.columns if column.foreign_keys}
    return values | {name: "id_1" for name in links.values()}


@pytest.mark.parametrize("revision", known_revisions())
def test_the_data_of_every_schema_comes_to_this_one(revision: str, tmp_path: Path) -> None:
    """Every table of the older schema has a row, and a backup of that version restores into this one."""
    path = tmp_path / "older.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        make_schema(connection, revision)
        metadata = MetaData()
        metadata.reflect(connection)
        for table in metadata.sorted_tables:
            if table.name not in {"alembic_version", "tallies"}:
                statement = insert(table).values({name: text(repr_of(value)) for name, value in one_row(table).items()})
                connection.execute(statement)
    engine.dispose()
    database = Database(f"sqlite:///{tmp_path}/octet.db")
    restore(path, database)
    with database.write() as session:
        check_tallies(session)
        assert session.scalar(text("SELECT id FROM jobs")) == "id_1"
        assert session.scalar(text("SELECT job_id FROM events")) == "id_1"
        session.execute(select(Base.metadata.tables["jobs"])).all()
    database.close()


def repr_of(value: Any) -> str:
    """Write a value as SQLite's literal."""
    if isinstance(value, bytes):
        return "x''"
    return str(value) if isinstance(value, int) else f"'{value}'"
