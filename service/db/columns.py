"""Column types that mean the same on SQLite and PostgreSQL."""

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
        if value is None:
            return None
        assert value.tzinfo is not None, "a moment without a time zone reached the database"
        utc = value.astimezone(UTC)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


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
