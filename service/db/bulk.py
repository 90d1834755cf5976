"""Statements that are executed often and with many rows.

SQLAlchemy finds again for each execution, and for each row of it, how the parameters are converted. Here that is found once
for each kind of database, and the statement's text is kept.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from sqlalchemy import BindParameter, Connection, Delete, Dialect, Select, Table, Update, bindparam
from sqlalchemy.orm import Session

Statement = Update | Delete
Row = Mapping[str, Any]
_Convert = Callable[[Any], Any] | None

_MOST_ROWS = 128
"""Rows of one statement on SQLite. With one row each, Python's driver takes as long as SQLite, and gives up the
interpreter's lock once for each row, which another thread may then hold for milliseconds."""


class Bulk:
    """A statement with named parameters (`bindparam`), for many rows at once. Its parameters must have types."""

    def __init__(self, statement: Statement) -> None:
        self._statement = statement
        self._compiled: dict[str, _Compiled] = {}

    def execute(self, session: Session, rows: Sequence[Row]) -> None:
        """Execute the statement once for each row. A row has a value for each parameter."""
        if not rows:
            return
        connection = session.connection()
        compiled = self._compiled.get(connection.dialect.name)
        if compiled is None:
            compiled = self._compiled[connection.dialect.name] = _Compiled(self._statement, connection.dialect)
        connection.exec_driver_sql(compiled.sql, [compiled.parameters(row) for row in rows])


class ForIds:
    """A statement about the rows that have some ids, and a few other parameters (`bindparam`). All must have types."""

    def __init__(self, build: Callable[[Sequence[BindParameter[str]]], Select[*tuple[Any, ...]] | Statement]) -> None:
        """build: makes the statement from a parameter for each id."""
        self._build = build
        self._compiled: dict[tuple[str, int], _Compiled] = {}

    def execute(self, session: Session, ids: Sequence[str], **others: Any) -> Sequence[tuple[Any, ...]]:
        """Execute the statement; returns a query's rows as the driver gives them. ids: at least one."""
        connection = session.connection()
        key = connection.dialect.name, len(ids)
        names = [f"id_{number}" for number in range(len(ids))]
        if key not in self._compiled:
            statement = self._build([bindparam(name) for name in names])
            self._compiled[key] = _Compiled(statement, connection.dialect)
        compiled = self._compiled[key]
        result = connection.exec_driver_sql(compiled.sql, compiled.parameters(dict(zip(names, ids, strict=True)) | others))
        return result.cursor.fetchall() if result.returns_rows and result.cursor is not None else []


class Rows:
    """Adds rows to a table. Many rows are one statement: on SQLite with a list of values, on PostgreSQL with an array of
    each column's values.
    """

    def __init__(self, table: Table, *, replaces: bool = False, as_text: Collection[str] = ()) -> None:
        """replaces: a row takes the place of one with the same primary key, also of one before it among the rows; otherwise
        such a row raises IntegrityError. as_text: names of JSON columns that get JSON texts instead of documents.
        """
        self._table = table
        self._replaces, self._as_text = replaces, as_text
        self._keys = [number for number, column in enumerate(table.columns) if column.primary_key]
        self._converts: dict[str, list[tuple[int, Callable[[Any], Any]]]] = {}
        self._sql: dict[tuple[str, int], str] = {}

    def execute(self, session: Session, rows: Sequence[tuple[Any, ...]]) -> None:
        """Write rows. A row has the values of all columns, in the order of the table."""
        if rows:
            self.execute_on(session.connection(), rows)

    def execute_on(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Write rows, at least one, as `execute` does."""
        dialect = connection.dialect
        if dialect.name == "sqlite":
            converted = list(zip(*self._columns(rows, dialect), strict=True))
            for begin, end in _parts(len(converted)):
                values = tuple(chain.from_iterable(converted[begin:end]))
                connection.exec_driver_sql(self._text(dialect, end - begin), values)
        else:
            if self._replaces:  # a statement of PostgreSQL writes a row once
                rows = list({tuple([row[number] for number in self._keys]): row for row in rows}.values())
            connection.exec_driver_sql(self._text(dialect, 0), tuple(self._columns(rows, dialect)))

    def _columns(self, rows: Sequence[tuple[Any, ...]], dialect: Dialect) -> list[Sequence[Any]]:
        """Return the values of each column as the driver takes them. None is NULL in a column of any type."""
        if dialect.name not in self._converts:
            found = [
                None if column.name in self._as_text else column.type.dialect_impl(dialect).bind_processor(dialect)
                for column in self._table.columns
            ]
            self._converts[dialect.name] = [(number, convert) for number, convert in enumerate(found) if convert]
        columns: list[Sequence[Any]] = [list(column) for column in zip(*rows, strict=True)]
        for number, convert in self._converts[dialect.name]:
            values = columns[number]
            if values.count(values[0]) == len(values):  # as the time of all rows that are added together
                columns[number] = [None if values[0] is None else convert(values[0])] * len(values)
            else:
                columns[number] = [None if value is None else convert(value) for value in values]
        return columns

    def _text(self, dialect: Dialect, num_rows: int) -> str:
        """Return the statement for so many rows; on PostgreSQL it is the same for all numbers."""
        key = dialect.name, num_rows
        if key not in self._sql:
            columns = list(self._table.columns)
            if dialect.name == "sqlite":
                row = f"({', '.join('?' * len(columns))})"
                values = f"VALUES {', '.join([row] * num_rows)}"
            else:
                arrays = (f"%s::{column.type.compile(dialect)}[]" for column in columns)
                values = f"SELECT * FROM unnest({', '.join(arrays)})"
            sql = f"INSERT INTO {self._table.name} ({', '.join(column.name for column in columns)}) {values}"
            if self._replaces:
                others = (f"{column.name} = excluded.{column.name}" for column in columns if not column.primary_key)
                keys = ", ".join(columns[number].name for number in self._keys)
                sql += f" ON CONFLICT ({keys}) DO UPDATE SET {', '.join(others)}"
            self._sql[key] = sql
        return self._sql[key]


def add_together(session: Session, parts: Sequence[tuple[Rows, Sequence[tuple[Any, ...]]]]) -> None:
    """Add rows to several tables, which may refer to rows that are added before them: on PostgreSQL by one statement."""
    connection = session.connection()
    filled = [(rows, values) for rows, values in parts if values]
    if connection.dialect.name == "sqlite":
        for rows, values in filled:
            rows.execute_on(connection, values)
    elif filled:
        statements = [rows._text(connection.dialect, 0) for rows, _ in filled]
        others = ", ".join(f"part_{number} AS ({statement})" for number, statement in enumerate(statements[:-1]))
        columns = [column for rows, values in filled for column in rows._columns(values, connection.dialect)]
        connection.exec_driver_sql(f"WITH {others} {statements[-1]}" if others else statements[-1], tuple(columns))


class _Compiled:
    """A statement's text for one kind of database, and how its parameters are converted."""

    def __init__(self, statement: Select[*tuple[Any, ...]] | Statement, dialect: Dialect) -> None:
        compiled = statement.compile(dialect=dialect)
        names = compiled.positiontup if compiled.positional else list(compiled.binds)
        assert names is not None, "a positional statement knows its order"
        self.sql = str(compiled)
        self._is_positional = compiled.positional
        converts = [compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect) for name in names]
        self._parameters: list[tuple[str, Any, _Convert]] = [
            (name, compiled.binds[name].value, convert) for name, convert in zip(names, converts, strict=True)
        ]

    def parameters(self, row: Row) -> Any:
        """Convert a row's values. A constant of the statement is a parameter with its own value."""
        found = [(name, row.get(name, own), convert) for name, own, convert in self._parameters]
        if self._is_positional:
            return tuple([convert(value) if convert else value for _, value, convert in found])
        return {name: convert(value) if convert else value for name, value, convert in found}


def _parts(num_rows: int) -> Iterable[tuple[int, int]]:
    """Divide rows into parts of 128, 64, 32 and at most 16, so that there are few different statements to prepare."""
    begin, size = 0, _MOST_ROWS
    while begin < num_rows:
        while size > max(16, num_rows - begin):
            size //= 2
        end = min(num_rows, begin + size)
        yield begin, end
        begin = end
