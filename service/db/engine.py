"""The database: read and write transactions, and the clock that measures all leases.

SQLite has one writer: a write transaction takes a lock in this process and then BEGIN IMMEDIATE. PostgreSQL has many
writers. Each locks the row of its job first (`store.jobs.lock_job`), so writes about one job still come one by one.
Whoever cannot get a lock for ten seconds gets OperationalError, however many wait.
"""

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Connection, Engine, create_engine, event, func, make_url, select, text
from sqlalchemy.exc import DBAPIError, DisconnectionError, OperationalError
from sqlalchemy.orm import Session

from octet.service.db.bulk import Transaction, run
from octet.service.db.migrate import check, upgrade

LOCK_TIMEOUT_S = 10.0
_SQLITE_WRITE = "octet_write"
_SQLITE_WAIT_MS = "octet_wait_ms"
_WAIT_STEPS = 100
FILE_REPLACED = "was removed or replaced while the server runs"
_CONNECTIONS, _MORE_CONNECTIONS = 10, 20  # of one process with PostgreSQL
_USED_AT_S = "octet_used_at_s"
_IDLE_S = 1.0
"""The time after its last use from which a connection to PostgreSQL is tested before the next, which is a round trip."""


class Clock(Protocol):
    """Tells the time. Tests pass one that they turn by hand."""

    def now(self) -> datetime: ...


class Database:
    """One database, given by its URL. The first use opens it."""

    def __init__(self, url: str, clock: Clock | None = None, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        """lock_timeout_s: the longest wait for locks that others hold, and for a free connection."""
        self._clock = clock
        self._lock_timeout_s = lock_timeout_s
        self.observe: Callable[[str, float, bool], None] = _ignore
        """Called after each transaction with its kind (read or write), its seconds, and whether the database broke it."""
        self.name = make_url(url).render_as_string(hide_password=True)
        """The URL without its password, for messages."""
        self._engine = _engine(url, lock_timeout_s)
        self._reading: Engine
        self._writing: Engine
        self.is_sqlite = self._engine.dialect.name == "sqlite"
        self._is_migrated = False
        self._file: tuple[int, int] | None = None
        self._one_writer = threading.Lock()
        self._writing_by_step: dict[int, Engine] = {}  # only for whoever has `_one_writer`
        if self.is_sqlite:
            self._reading, self._writing = self._engine, self._engine.execution_options(**{_SQLITE_WRITE: True})
        else:
            self._writing = self._engine
            self._reading = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    @property
    def path(self) -> Path | None:
        """The file of a database of SQLite; None for one of PostgreSQL."""
        return Path(self._engine.url.database) if self.is_sqlite and self._engine.url.database else None

    def migrate(self) -> None:
        """Bring the schema up to this version. Several processes may call it at once; once it is done, a call does nothing.

        Raises NewerSchema if a newer version of Octet has migrated the database.
        """
        if self._is_migrated:
            return
        if self.path is not None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._turn_to_write() as engine, engine.connect() as connection, connection.begin():
            if not self.is_sqlite:
                connection.execute(select(func.pg_advisory_xact_lock(func.hashtext("octet_migrations"))))
            upgrade(connection)
            self._file = _file_of(self.path)
        self._is_migrated = True

    def check_schema(self) -> None:
        """Raise NewerSchema if a newer version of Octet has migrated the database since `migrate`."""
        with self._reading.connect() as connection:
            check(connection)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a transaction that reads one consistent state and changes nothing."""
        self._require_file()
        with self._timed("read"), Session(self._reading, autoflush=False) as session, session.begin():
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a write transaction. All of it is durable when the block ends, and none of it if the block raises."""
        with (
            self._timed("write"),
            self._turn_to_write() as engine,
            Session(engine, expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session

    @contextmanager
    def write_rows(self) -> Iterator[Connection]:
        """Open a write transaction as `write` does, without a session: for the statements of `octet.service.db.bulk`."""
        with self._timed("write"), self._turn_to_write() as engine, engine.begin() as connection:
            yield connection

    def now(self, transaction: Transaction, read_at: datetime | None = None) -> datetime:
        """Return the time that leases are measured by. On PostgreSQL it is the server's, which all processes share.

        read_at: the time of PostgreSQL's clock that a statement of this transaction has read, if one has.
        """
        if self._clock is not None:
            return self._clock.now()
        if self.is_sqlite:
            return datetime.now(UTC)
        moment = read_at or transaction.execute(select(func.clock_timestamp())).scalar_one()
        return moment.astimezone(UTC)

    def num_bytes(self, session: Session) -> int:
        """The size of the whole database on disk, in bytes."""
        if not self.is_sqlite:
            return int(session.execute(select(func.pg_database_size(func.current_database()))).scalar_one())
        return int(session.execute(text("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")).scalar_one())

    def close(self) -> None:
        self._engine.dispose()

    def _require_file(self) -> None:
        """Raise OperationalError if the file of SQLite is not the one that was opened: what is written to that is lost."""
        if self._file is not None and _file_of(self.path) != self._file:
            raise OperationalError("BEGIN", None, sqlite3.OperationalError(f"{self.path} {FILE_REPLACED}"))

    @contextmanager
    def _turn_to_write(self) -> Iterator[Engine]:
        """Wait for the other writers of this process. What is left of the time is for the lock that other processes hold."""
        if not self.is_sqlite:
            yield self._writing
            return
        began = time.monotonic()
        with self._alone():
            self._require_file()
            left_s = max(0.0, self._lock_timeout_s - (time.monotonic() - began))
            yield self._waiting_for(left_s)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the other writers of this process away."""
        if not self._one_writer.acquire(timeout=self._lock_timeout_s):
            locked = sqlite3.OperationalError(f"database is locked: no turn to write within {self._lock_timeout_s:g} s")
            raise OperationalError("BEGIN IMMEDIATE", None, locked)
        try:
            yield
        finally:
            self._one_writer.release()

    def _waiting_for(self, left_s: float) -> Engine:
        """Return the engine that waits for so long, rounded up to a hundredth of the longest wait, so that there are few."""
        step = math.ceil(_WAIT_STEPS * left_s / self._lock_timeout_s)
        if step not in self._writing_by_step:
            wait_ms = int(1000 * self._lock_timeout_s * step / _WAIT_STEPS)
            self._writing_by_step[step] = self._writing.execution_options(**{_SQLITE_WAIT_MS: wait_ms})
        return self._writing_by_step[step]

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        began, broke = time.perf_counter(), False
        try:
            yield
        except DBAPIError:
            broke = True
            raise
        finally:
            self.observe(kind, time.perf_counter() - began, broke)


def _file_of(path: Path | None) -> tuple[int, int] | None:
    """Return what tells a file from another one in its place; (0, 0) for none, and None without a path."""
    if path is None:
        return None
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_dev, status.st_ino


def _ignore(kind: str, seconds: float, broke: bool) -> None:
    return None


def _engine(url: str, lock_timeout_s: float) -> Engine:
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        connect_args: dict[str, Any] = {"check_same_thread": False, "timeout": lock_timeout_s}
        options = {_SQLITE_WAIT_MS: int(1000 * lock_timeout_s)}
        engine = create_engine(
            parsed,
            connect_args=connect_args,
            pool_timeout=lock_timeout_s,
            pool_use_lifo=True,  # the connection used last has the newest pages in its cache
            execution_options=options,
        )
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    if parsed.get_backend_name() == "postgresql":
        # A request first waits for a connection and then for a lock: each gets half of the time.
        server_options = f"-c timezone=UTC -c lock_timeout={int(500 * lock_timeout_s)}ms -c statement_timeout=30s"
        engine = create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            connect_args={"options": server_options, "connect_timeout": 5},
            pool_size=_CONNECTIONS,
            max_overflow=_MORE_CONNECTIONS,
            pool_timeout=lock_timeout_s / 2,
            pool_use_lifo=True,  # the connection used last has prepared the statements that are executed most
        )
        event.listen(engine, "checkin", _note_use)
        event.listen(engine, "checkout", partial(_ask_if_idle, engine.dialect))
        return engine
    raise ValueError(f"database {parsed.get_backend_name()!r} is not supported; use sqlite:///… or postgresql://…")


def _note_use(_connection: Any, record: Any) -> None:
    record.info[_USED_AT_S] = time.monotonic()


def _ask_if_idle(dialect: Any, connection: Any, record: Any, _proxy: Any) -> None:
    """Ask the server whether it still has a connection that was idle. The pool replaces one that is gone."""
    if time.monotonic() - record.info.get(_USED_AT_S, -math.inf) < _IDLE_S:
        return
    try:
        dialect.do_ping(connection)
    except dialect.loaded_dbapi.Error as error:
        raise DisconnectionError from error


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # `_begin_sqlite` says BEGIN
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    # Most transactions wait as long as the one before them on this connection.
    if connection.info.get(_SQLITE_WAIT_MS) != options[_SQLITE_WAIT_MS]:
        run(connection, f"PRAGMA busy_timeout={options[_SQLITE_WAIT_MS]}")
        connection.info[_SQLITE_WAIT_MS] = options[_SQLITE_WAIT_MS]
    run(connection, "BEGIN IMMEDIATE" if options.get(_SQLITE_WRITE, False) else "BEGIN")
