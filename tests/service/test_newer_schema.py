"""A database that a newer version of Octet has migrated: whoever does not know its schema says so and ends."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from octet.service.db.engine import Database
from octet.service.db.migrate import NewerSchema, known_revisions
from octet.service.processes.schema_watch import ending_on_newer_schema
from octet.service.processes.startup import database_of_one_machine
from octet.service.settings import Settings
from tests.kit.waiting import LONG_S
from tests.service.conftest import POOLS

NEWER = "9999"


def set_version(database: Database, version: str) -> None:
    with database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = :version"), {"version": version})


@pytest.fixture
def database(database: Database) -> Iterator[Database]:
    """One database of PostgreSQL serves many tests, so its version is put back."""
    yield database
    set_version(database, known_revisions()[-1])


def test_a_start_says_which_schema_is_there_which_is_known_and_what_to_do(database: Database, database_url: str) -> None:
    set_version(database, NEWER)
    other = Database(database_url)
    with pytest.raises(NewerSchema) as caught:
        other.migrate()
    other.close()
    for words in (NEWER, known_revisions()[-1], "Start that version here too"):
        assert words in str(caught.value)


def test_octet_serve_ends_with_these_words(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, pools=POOLS)
    database = database_of_one_machine(settings)
    set_version(database, NEWER)
    database.close()
    with pytest.raises(RuntimeError, match=f"the database has schema '{NEWER}'"):
        database_of_one_machine(settings)


def test_a_process_that_serves_ends_once_the_schema_is_newer(database: Database) -> None:
    ended = threading.Event()

    def serve() -> None:
        with ending_on_newer_schema(database, ended.set, look_s=0.01):
            assert not ended.wait(0.1), "its own schema is no reason"
            set_version(database, NEWER)
            assert ended.wait(LONG_S)

    with pytest.raises(NewerSchema):
        serve()


def test_a_database_that_is_away_for_a_while_is_no_reason(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'octet.db'}")
    database.migrate()
    ended = threading.Event()
    (tmp_path / "octet.db").rename(tmp_path / "away")
    database.close()  # its connections
    (tmp_path / "octet.db").mkdir()
    with ending_on_newer_schema(database, ended.set, look_s=0.01):
        assert not ended.wait(0.1)
        (tmp_path / "octet.db").rmdir()
        (tmp_path / "away").rename(tmp_path / "octet.db")
    database.close()
