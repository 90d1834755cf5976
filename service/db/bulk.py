"""Statements that are executed often and with many rows.

SQLAlchemy finds again for each execution, and for each row of it, how the parameters are converted, and describes the columns
of each result. Here that is found once for each kind of database, the statement's text is kept, and the driver executes it.

Many rows are one statement. With a statement for each row, Python's driver of SQLite gives up the interpreter's lock once for
each row, which another thread may then hold for milliseconds.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import chain
from typing import Any

from sqlalchemy import JSON, Column, Connection, Dialect, LargeBinary, Table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

Transaction = Session | Connection
"""A transaction that has begun: of a session, or without one."""
_Convert = Callable[[Any], Any] | None

_MOST_ROWS = 128
"""Rows of one statement on SQLite."""


class Changes:
    """Changes columns of rows, each to values of its own."""

    def __init__(self, table: Table, key: str, columns: Sequence[str]) -> None:
        """key: the name of the column that finds a row. columns: the names of those that change."""
        self._table, self._key, self._names = table, key, [key, *columns]
        self._converts: dict[str, list[_Convert]] = {}
        self._sql: dict[tuple[str, int], str] = {}

    def execute(self, transaction: Transaction, rows: Sequence[tuple[Any, ...]]) -> None:
        """Change rows. Each has its key, and then the values of the columns. No key comes twice."""
        if not rows:
            return
        connection = connection_of(transaction)
        dialect = connection.dialect
        if dialect.name == "sqlite":
            converted = list(zip(*self._columns(rows, dialect), strict=True))
            for begin, end in _parts(len(converted)):
                run(connection, self._text(dialect, end - begin), tuple(chain.from_iterable(converted[begin:end])))
        else:
            run(connection, self._text(dialect, 0), self._arrays(rows, dialect))

    def _arrays(self, rows: Sequence[tuple[Any, ...]], dialect: Dialect) -> tuple[Any, ...]:
        """Return each column of rows as the parameter of a statement of PostgreSQL."""
        return _arrays([self._table.columns[name] for name in self._names], self._columns(rows, dialect))

    def _columns(self, rows: Sequence[tuple[Any, ...]], dialect: Dialect) -> list[Sequence[Any]]:
        """Return the values of each column as the driver takes them."""
        if dialect.name not in self._converts:
            columns_of_table = [self._table.columns[name] for name in self._names]
            self._converts[dialect.name] = [_convert_of(column, dialect) for column in columns_of_table]
        pairs = zip(self._converts[dialect.name], zip(*rows, strict=True), strict=True)
        return [_converted(column, convert) if convert else column for convert, column in pairs]

    def _text(self, dialect: Dialect, num_rows: int) -> str:
        key = dialect.name, num_rows
        if key not in self._sql:
            self._sql[key] = self._made(dialect, num_rows)
        return self._sql[key]

    def _made(self, dialect: Dialect, num_rows: int) -> str:
        changed = ", ".join(f"{name} = given.{name}" for name in self._names[1:])
        given = _given(dialect, [self._table.columns[name] for name in self._names], num_rows)
        where = f"{self._table.name}.{self._key} = given.{self._key}"
        update = f"UPDATE {self._table.name} SET {changed} FROM given WHERE {where}"
        return f"WITH given({', '.join(self._names)}) AS ({given}) {update}"


class Lookup:
    """A query of rows that belong to given values: its text reads these from a table named `given`."""

    def __init__(self, columns: Sequence[Column[Any]], sql: str) -> None:
        """columns: those that `given` has, with their names."""
        self._columns, self._query = columns, sql
        self._sql: dict[tuple[str, int], str] = {}

    def execute(self, transaction: Transaction, values: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return the rows of all given values, as the driver gives them, in no order."""
        connection = connection_of(transaction)
        if not values:
            return []
        if connection.dialect.name != "sqlite":
            return list(run(connection, self._text(connection.dialect, 0), _arrays(self._columns, zip(*values, strict=True))))
        parts = [values[begin:end] for begin, end in _parts(len(values))]
        texts = [self._text(connection.dialect, len(part)) for part in parts]
        found = [run(connection, sql, tuple(chain.from_iterable(part))) for sql, part in zip(texts, parts, strict=True)]
        return list(chain.from_iterable(found))

    def _text(self, dialect: Dialect, num_rows: int) -> str:
        key = dialect.name, num_rows
        if key not in self._sql:
            names = ", ".join(column.name for column in self._columns)
            self._sql[key] = f"WITH given({names}) AS ({_given(dialect, self._columns, num_rows)}) {self._query}"
        return self._sql[key]


class Rows:
    """Adds rows to a table. Many rows are one statement: on SQLite with a list of values, on PostgreSQL with an array of
    each column's values.
    """

    def __init__(
        self,
        table: Table,
        *,
        replaces: bool = False,
        as_text: Collection[str] = (),
        always: Mapping[str, str | int | None] | None = None,
        then: str = "",
    ) -> None:
        """replaces: a row takes the place of one with the same primary key, also of one before it among the rows; otherwise
        such a row raises IntegrityError. as_text: names of JSON columns that get JSON texts instead of documents.
        always: columns that have the same value in all rows; it is in the statement, and not in the rows. then: the end of
        the statement where neither suits.
        """
        self._table, self._always = table, always or {}
        self._given = [column for column in table.columns if column.name not in self._always]
        self._replaces, self._as_text, self._then = replaces, as_text, then
        self._keys = [number for number, column in enumerate(self._given) if column.primary_key]
        self._converts: dict[str, list[tuple[int, Callable[[Any], Any]]]] = {}
        self._sql: dict[tuple[str, int], str] = {}

    def execute(self, transaction: Transaction, rows: Sequence[tuple[Any, ...]]) -> Sequence[tuple[Any, ...]]:
        """Write rows. A row has the values of all columns but those of `always`, in the order of the table.

        Returns what the statement returns (`then`), in no order.
        """
        if not rows:
            return []
        connection = connection_of(transaction)
        dialect = connection.dialect
        if dialect.name == "sqlite":
            converted = list(zip(*self._columns(rows, dialect), strict=True))
            parts = [converted[begin:end] for begin, end in _parts(len(converted))]
            results = [run(connection, self._text(dialect, len(part)), tuple(chain.from_iterable(part))) for part in parts]
            return list(chain.from_iterable(results))
        if self._replaces:  # a statement of PostgreSQL writes a row once
            rows = list({tuple([row[number] for number in self._keys]): row for row in rows}.values())
        return run(connection, self._text(dialect, 0), self._arrays(rows, dialect))

    def _arrays(self, rows: Sequence[tuple[Any, ...]], dialect: Dialect) -> tuple[Any, ...]:
        """Return each column of rows as the parameter of a statement of PostgreSQL."""
        return _arrays(self._given, self._columns(rows, dialect))

    def _columns(self, rows: Sequence[tuple[Any, ...]], dialect: Dialect) -> list[Sequence[Any]]:
        """Return the values of each column as the driver takes them. None is NULL in a column of any type."""
        if dialect.name not in self._converts:
            found = [None if column.name in self._as_text else _convert_of(column, dialect) for column in self._given]
            self._converts[dialect.name] = [(number, convert) for number, convert in enumerate(found) if convert]
        columns: list[Sequence[Any]] = [list(column) for column in zip(*rows, strict=True)]
        for number, convert in self._converts[dialect.name]:
            columns[number] = _converted(columns[number], convert)
        return columns

    def _text(self, dialect: Dialect, num_rows: int) -> str:
        """Return the statement for so many rows; on PostgreSQL it is the same for all numbers."""
        key = dialect.name, num_rows
        if key not in self._sql:
            columns = list(self._table.columns)
            names = ", ".join([*(column.name for column in self._given), *self._always])
            values = _given(dialect, self._given, num_rows, [_literal(value) for value in self._always.values()])
            sql = f"INSERT INTO {self._table.name} ({names}) {values} {self._then}".rstrip()
            if self._replaces:
                others = (f"{column.name} = excluded.{column.name}" for column in columns if not column.primary_key)
                keys = ", ".join(self._given[number].name for number in self._keys)
                sql += f" ON CONFLICT ({keys}) DO UPDATE SET {', '.join(others)}"
            self._sql[key] = sql
        return self._sql[key]


def write_together(transaction: Transaction, parts: Sequence[tuple[Rows | Changes, Sequence[tuple[Any, ...]]]]) -> None:
    """Add and change rows of several tables, by one statement on PostgreSQL. Rows may refer to rows that are added before them.

    No row is written twice.
    """
    connection = connection_of(transaction)
    filled = [(rows, values) for rows, values in parts if values]
    if connection.dialect.name == "sqlite":
        for rows, values in filled:
            rows.execute(connection, values)
    elif filled:
        statements = [rows._text(connection.dialect, 0) for rows, _ in filled]
        others = ", ".join(f"part_{number} AS ({statement})" for number, statement in enumerate(statements[:-1]))
        arrays = chain.from_iterable(rows._arrays(values, connection.dialect) for rows, values in filled)
        run(connection, f"WITH {others} {statements[-1]}" if others else statements[-1], tuple(arrays))


def connection_of(transaction: Transaction) -> Connection:
    """Return the connection of a transaction."""
    return transaction if isinstance(transaction, Connection) else transaction.connection()


@contextmanager
def session_of(transaction: Transaction) -> Iterator[Session]:
    """Give a transaction a session if it has none, for the ORM. What the session writes is flushed when the block ends."""
    if isinstance(transaction, Session):
        yield transaction
        return
    with Session(transaction, autoflush=False, expire_on_commit=False) as session:
        yield session
        session.flush()


def run(connection: Connection, sql: str, parameters: Any = ()) -> Sequence[tuple[Any, ...]]:
    """Let the driver execute a statement; returns a query's rows. Raises the driver's errors as SQLAlchemy does."""
    dialect = connection.dialect
    cursor = connection.connection.cursor()
    try:
        for observe in connection.dispatch.before_cursor_execute:
            observe(connection, cursor, sql, parameters, None, False)
        cursor.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []
    except dialect.loaded_dbapi.Error as error:
        went_away = dialect.is_disconnect(error, connection.connection, cursor)
        if went_away:
            connection.invalidate(error)
        raise DBAPIError.instance(
            sql, parameters, error, dialect.loaded_dbapi.Error, connection_invalidated=went_away, dialect=dialect
        ) from error
    finally:
        cursor.close()


def _converted(values: Sequence[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """Convert the values of a column. None is NULL in a column of any type."""
    if values.count(values[0]) == len(values):  # as the time of all rows that are written together
        return [None if values[0] is None else convert(values[0])] * len(values)
    return [None if value is None else convert(value) for value in values]


def _convert_of(column: Column[Any], dialect: Dialect) -> _Convert:
    """Return what converts a value of a column. Documents become JSON texts on both databases."""
    if isinstance(column.type, JSON):
        return json.dumps
    found: _Convert = column.type.dialect_impl(dialect).bind_processor(dialect)
    return found


def _arrays(columns: Sequence[Column[Any]], values: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
    """Return converted values, by column, as arrays for PostgreSQL. The driver itself writes those of bytes."""
    pairs = zip(columns, values, strict=True)
    return tuple([list(of) if isinstance(column.type, LargeBinary) else array_text(of) for column, of in pairs])


def _given(dialect: Dialect, columns: Sequence[Column[Any]], num_rows: int, literals: Sequence[str] = ()) -> str:
    """Write a query of rows that are parameters, and literals behind them, the same in each row.

    On SQLite it is a list of values, on PostgreSQL an array for each column.
    """
    if dialect.name == "sqlite":
        row = f"({', '.join(['?'] * len(columns) + [*literals])})"
        return f"VALUES {', '.join([row] * num_rows)}"
    arrays = ", ".join(f"%s::{column.type.compile(dialect)}[]" for column in columns)
    return f"SELECT {', '.join(['*', *literals])} FROM unnest({arrays})"


def _literal(value: str | int | None) -> str:
    """Write a constant of ours for a statement that has parameters."""
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    assert re.fullmatch(r"[\w.{}]*", value), "a constant needs no quoting"
    return f"'{value}'"


def _parts(num_rows: int) -> Iterable[tuple[int, int]]:
    """Divide rows into parts of 128, 64, 32 and at most 16, so that there are few different statements to prepare."""
    begin, size = 0, _MOST_ROWS
    while begin < num_rows:
        while size > max(16, num_rows - begin):
            size //= 2
        end = min(num_rows, begin + size)
        yield begin, end
        begin = end


# Arrays as PostgreSQL reads them: the elements' texts in braces.
#
# The driver writes an array of texts with a regular expression in Python, once for each quote. For 16 submissions, whose specs
# are full of quotes, that took two thirds of the time of the thread that stores them. Here a text takes two replacements.

Element = str | bool | int | float | datetime | None


def array_text(elements: Sequence[Element]) -> str:
    """Write an array of one dimension. None is NULL. Raises KeyError for an element of another type."""
    return f"{{{','.join([_WRITE[type(element)](element) for element in elements])}}}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_WRITE: dict[type, Callable[[Any], str]] = {
    str: _quoted,
    bool: str,
    int: str,
    float: repr,
    datetime: lambda moment: f'"{moment.isoformat()}"',
    type(None): lambda _: "NULL",
}
