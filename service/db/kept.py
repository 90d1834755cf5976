"""The connection to SQLite that is kept for short write transactions, without SQLAlchemy around their statements.

A transaction of eight reports spent a quarter of its time on taking a connection from the pool, on SQLAlchemy's events and on
its objects for transactions, which cost as much for one statement as for a hundred.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Dialect, Engine
from sqlalchemy.exc import DBAPIError


class Kept:
    """One connection. Whoever uses it has the only turn to write of this process."""

    def __init__(self, engine: Engine) -> None:
        """engine: whose pool the connection comes from, with the first transaction."""
        self._engine = engine
        self._connection: Connection | None = None
        self._driver: sqlite3.Connection
        self._wait_ms = -1

    @property
    def dialect(self) -> Dialect:
        return self._engine.dialect

    @contextmanager
    def transaction(self, wait_ms: int) -> Iterator["Kept"]:
        """Open a write transaction. It is durable when the block ends, and leaves nothing if the block raises.

        wait_ms: the longest wait for other processes that write. Raises DBAPIError as SQLAlchemy does.
        """
        if self._connection is None:
            connection = self._engine.connect()
            driver = connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection), "the engine is of SQLite"
            self._connection, self._driver, self._wait_ms = connection, driver, -1
        try:
            if self._wait_ms != wait_ms:
                self.run(f"PRAGMA busy_timeout={wait_ms}")
                self._wait_ms = wait_ms
            self.run("BEGIN IMMEDIATE")
            yield self
            self._commit(self._connection)
        except BaseException:
            self._roll_back()
            raise

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> Sequence[tuple[Any, ...]]:
        """Execute a statement; returns a query's rows."""
        for observe in self._engine.dispatch.before_cursor_execute:
            observe(self._connection, None, sql, parameters, None, False)
        try:
            return self._driver.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise self._as_sqlalchemy(error, sql, parameters) from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _commit(self, connection: Connection) -> None:
        for observe in self._engine.dispatch.commit:
            observe(connection)
        try:
            self._driver.commit()
        except sqlite3.Error as error:
            raise self._as_sqlalchemy(error, "COMMIT", ()) from error

    def _roll_back(self) -> None:
        """Undo what there is of a transaction. A connection that does not even do that is replaced with the next one."""
        try:
            self._driver.rollback()
        except sqlite3.Error:
            assert self._connection is not None, "a transaction has a connection"
            with suppress(DBAPIError):
                self._connection.invalidate()
            self.close()

    def _as_sqlalchemy(self, error: sqlite3.Error, sql: str, parameters: Sequence[Any]) -> BaseException:
        return DBAPIError.instance(sql, parameters, error, self.dialect.loaded_dbapi.Error, dialect=self.dialect)
