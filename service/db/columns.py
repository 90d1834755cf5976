"""Column types that mean the same on SQLite and PostgreSQL."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import DateTime, Dialect, Enum, String, Text, TypeDecorator

S = TypeVar("S", bound=StrEnum)
NUL, REPLACEMENT = "\0", "\N{REPLACEMENT CHARACTER}"


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC. SQLite has no time zones: it holds the UTC time as text that sorts."""

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
    """Text that somebody else wrote. PostgreSQL cannot hold a zero byte, so it becomes U+FFFD on both."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value if value is None else value.replace(NUL, REPLACEMENT)


def state_column(states: type[S]) -> Enum:
    """The values of an enum as plain text: a new state needs no change of the schema."""
    return Enum(states, native_enum=False, create_constraint=False, length=32, values_callable=_values)


def _values(states: Any) -> list[str]:
    return [state.value for state in states]


def id_column() -> String:
    """An id of ours: prefix, underscore, 26 characters."""
    return String(31)
