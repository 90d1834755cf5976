"""Column types that mean the same on SQLite and PostgreSQL."""

from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import DateTime, Dialect, Enum, String, Text, TypeDecorator

S = TypeVar("S", bound=StrEnum)
NUL, REPLACEMENT = "\0", "\N{REPLACEMENT CHARACTER}"


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC. SQLite has no time zones, so it stores the UTC time as text that sorts."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else _in_utc(value)

    def bind_processor(self, dialect: Dialect) -> Callable[[datetime | None], Any]:
        """Return the conversion to what the driver takes. SQLAlchemy's own conversion for SQLite takes four times as long."""
        return _sqlite_text if dialect.name == "sqlite" else lambda value: None if value is None else _in_utc(value)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _in_utc(value: datetime) -> datetime:
    assert value.tzinfo is not None, "a moment without a time zone reached the database"
    return value if value.tzinfo is UTC else value.astimezone(UTC)


def _sqlite_text(value: datetime | None) -> str | None:
    """Render a moment as SQLAlchemy's type for SQLite does: microseconds, no time zone."""
    return None if value is None else _in_utc(value).isoformat(" ", "microseconds")[:26]


class SafeText(TypeDecorator[str]):
    """Text from outside. PostgreSQL cannot store a zero byte, so on both databases it becomes U+FFFD."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value if value is None else value.replace(NUL, REPLACEMENT)


def state_column(states: type[S]) -> Enum:
    """Make a column type that stores an enum as plain text, so a new state needs no migration."""
    return Enum(states, native_enum=False, create_constraint=False, length=32, values_callable=_values)


def _values(states: Any) -> list[str]:
    return [state.value for state in states]


def id_column() -> String:
    """Make a column type for our ids: prefix, underscore, 26 characters."""
    return String(31)
