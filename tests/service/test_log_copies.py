"""SQLite's log is copied into the database by a thread, so that no commit does it and the log stays short."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from service.db import log_copies
from service.db.engine import Database
from service.db.log_copies import COMMITS, LogCopies
from tests.waiting import LONG_S

FRAME = 4096 + 24


class Ended(LogCopies):
    """Says when a copy has ended."""

    ended = threading.Semaphore(0)

    def _copy(self, connection: sqlite3.Connection) -> None:
        try:
            super()._copy(connection)
        finally:
            self.ended.release()


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setattr("service.db.engine.LogCopies", Ended)
    monkeypatch.setattr(Ended, "ended", threading.Semaphore(0))
    database = Database(f"sqlite:///{tmp_path / 'octet.db'}", lock_timeout_s=0.2)
    yield database
    database.close()


def commit(database: Database, number: int) -> None:
    for _ in range(number):
        with database.write_rows() as connection:
            connection.execute(text("CREATE TABLE IF NOT EXISTS counts (number INTEGER)"))
            connection.execute(text("INSERT INTO counts VALUES (1)"))


def num_pages_in_log(tmp_path: Path) -> int:
    return (tmp_path / "octet.db-wal").stat().st_size // FRAME


def num_rows_without_log(tmp_path: Path) -> int:
    """Count what is in the database's own file, which was copied."""
    (tmp_path / "copy.db").write_bytes((tmp_path / "octet.db").read_bytes())
    connection = sqlite3.connect(tmp_path / "copy.db")
    (number,) = connection.execute("SELECT count(*) FROM counts").fetchone()
    connection.close()
    return int(number)


def test_the_log_begins_again_after_each_copy(database: Database, tmp_path: Path) -> None:
    for number in range(1, 6):
        commit(database, COMMITS)
        assert Ended.ended.acquire(timeout=LONG_S)
        assert num_rows_without_log(tmp_path) == number * COMMITS
    assert num_pages_in_log(tmp_path) < 2 * COMMITS + 8  # 5 * COMMITS without the copies


def test_a_reader_keeps_its_view_and_the_rest_is_copied_later(database: Database, tmp_path: Path) -> None:
    commit(database, 1)
    with database.read() as session:
        assert session.execute(text("SELECT count(*) FROM counts")).scalar_one() == 1
        commit(database, COMMITS - 1)
        assert Ended.ended.acquire(timeout=LONG_S)
        assert session.execute(text("SELECT count(*) FROM counts")).scalar_one() == 1
    commit(database, COMMITS)
    assert Ended.ended.acquire(timeout=LONG_S)
    assert num_rows_without_log(tmp_path) == 2 * COMMITS


def test_a_copy_that_fails_stops_neither_commits_nor_later_copies(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_connection: sqlite3.Connection) -> bool:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(log_copies, "copied_all", fail)
        commit(database, COMMITS)
        assert Ended.ended.acquire(timeout=LONG_S)
    commit(database, COMMITS)
    assert Ended.ended.acquire(timeout=LONG_S)
    assert "the database's log was not copied: disk I/O error" in caplog.text
    assert num_rows_without_log(tmp_path) == 2 * COMMITS
