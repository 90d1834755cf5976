"""Statements that are executed often and with many rows.

SQLAlchemy finds again for each row of an `executemany` how its parameters are converted.
Here that is found once for each kind of database.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Delete, Dialect, Insert, Table, Update, bindparam
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

Statement = Insert | Update | Delete
Row = Mapping[str, Any]
_Convert = Callable[[Any], Any] | None


class Bulk:
    """A statement with named parameters (`bindparam`), for many rows at once. Its parameters must have types."""

    def __init__(self, build: Callable[[Dialect], Statement]) -> None:
        """build: makes the statement for a kind of database."""
        self._build = build
        self._compiled: dict[str, tuple[str, bool, list[tuple[str, _Convert]]]] = {}

    def execute(self, session: Session, rows: Sequence[Row]) -> None:
        """Execute the statement once for each row. A row has a value for each parameter."""
        if not rows:
            return
        connection = session.connection()
        sql, is_positional, parameters = self._compile(connection.dialect)
        if is_positional:
            tuples = [tuple([convert(row[name]) if convert else row[name] for name, convert in parameters]) for row in rows]
            connection.exec_driver_sql(sql, tuples)
        else:
            dicts = [{name: convert(row[name]) if convert else row[name] for name, convert in parameters} for row in rows]
            connection.exec_driver_sql(sql, dicts)

    def _compile(self, dialect: Dialect) -> tuple[str, bool, list[tuple[str, _Convert]]]:
        known = self._compiled.get(dialect.name)
        if known is None:
            compiled = self._build(dialect).compile(dialect=dialect)
            names = compiled.positiontup if compiled.positional else list(compiled.binds)
            assert names is not None, "a positional statement knows its order"
            converts = [compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect) for name in names]
            known = self._compiled[dialect.name] = str(compiled), compiled.positional, list(zip(names, converts, strict=True))
        return known


def upsert(table: Table) -> Bulk:
    """Make the statement that adds rows, or replaces those that have the same primary key. Rows have all columns."""
    keys = [column.name for column in table.primary_key]

    def build(dialect: Dialect) -> Insert:
        made: sqlite.Insert | postgresql.Insert = (sqlite if dialect.name == "sqlite" else postgresql).insert(table)
        insert = made.values({column.name: bindparam(column.name, type_=column.type) for column in table.columns})
        others = {column.name: insert.excluded[column.name] for column in table.columns if column.name not in keys}
        return insert.on_conflict_do_update(index_elements=keys, set_=others)

    return Bulk(build)
