"""The connection to SQLite that is kept: all or nothing, errors as SQLAlchemy's, and a new one when it breaks."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError

from service.db.bulk import run, runner_of
from service.db.engine import Database
from service.db.kept import Kept


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path}/test.db", lock_timeout_s=0.2)
    with database.write_rows() as connection:
        run(connection, "CREATE TABLE numbers (number INTEGER PRIMARY KEY)")
    yield database
    database.close()


def add(database: Database, *numbers: int) -> None:
    with database.write_rows_quickly() as transaction:
        assert isinstance(transaction, Kept)
        for number in numbers:
            if not isinstance(number, int):
                raise TypeError(number)
            run(runner_of(transaction), "INSERT INTO numbers VALUES (?)", (number,))


def numbers(database: Database) -> list[int]:
    with database.read() as session:
        return [number for (number,) in run(session.connection(), "SELECT number FROM numbers ORDER BY number")]


def test_a_transaction_counts_as_a_whole(database: Database) -> None:
    add(database, 1, 2)
    with pytest.raises(DBAPIError, match="UNIQUE"):
        add(database, 3, 1)
    add(database, 4)
    assert numbers(database) == [1, 2, 4]


def test_whoever_raises_leaves_nothing(database: Database) -> None:
    with pytest.raises(TypeError):
        add(database, 1, object())  # type: ignore[arg-type]
    with database.write_rows() as connection:  # the turn to write was given back
        run(connection, "INSERT INTO numbers VALUES (2)")
    assert numbers(database) == [2]


def test_another_process_that_writes_is_waited_for_and_then_an_error(database: Database) -> None:
    add(database, 1)
    with closing(sqlite3.connect(str(database.path), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OperationalError, match="locked"):
            add(database, 2)
    add(database, 3)
    assert numbers(database) == [1, 3]


def test_a_connection_that_broke_is_replaced(database: Database) -> None:
    add(database, 1)
    kept = database._kept
    assert kept is not None
    kept._driver.close()
    with pytest.raises(ProgrammingError):
        add(database, 2)
    add(database, 3)
    assert numbers(database) == [1, 3]
