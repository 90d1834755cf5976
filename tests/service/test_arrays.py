"""Arrays of PostgreSQL as text: the server reads back what was written."""

from datetime import UTC, datetime
from typing import Any

import pytest

from octet.service.db.bulk import array_text, run
from octet.service.db.engine import Database

TEXTS = [
    "",
    "plain",
    "null",
    "NULL",
    None,
    'a "quoted" \\ word',
    "{a,b}",
    "comma, space ",
    "\n\t",
    "\\x41",
    "é😀",
    '{"a": "\\"b\\""}',
]
MOMENTS = [datetime(2026, 11, 23, 4, 5, 6, 789, UTC), None]


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("type_", "elements"),
    [
        ("text", TEXTS),
        ("text", []),
        ("integer", [1, -2, None, 2**31 - 1]),
        ("bigint", [2**62]),
        ("float8", [0.1, -1e-300, float("inf"), float("-inf"), None, 1e22]),
        ("boolean", [True, False, None]),
        ("timestamptz", MOMENTS),
    ],
)
def test_postgresql_reads_what_was_written(postgres_database: Database, type_: str, elements: list[Any]) -> None:
    with postgres_database.write_rows() as connection:
        rows = run(connection, f"SELECT * FROM unnest(%s::{type_}[])", (array_text(elements),))
    assert [row[0] for row in rows] == elements


def test_an_element_of_another_type_is_not_written() -> None:
    with pytest.raises(KeyError):
        array_text([b"bytes"])  # type: ignore[list-item]
