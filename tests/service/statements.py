"""Counts what a database is asked, so that tests can hold the cost of a request without measuring time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from tests.service.world import World


@contextmanager
def counted(world: World) -> Iterator[dict[str, int]]:
    """Count statements, but for those that begin a transaction, and commits, which are the waits for the disk."""
    counts = {"statements": 0, "commits": 0}

    def executed(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        counts["statements"] += not statement.startswith(("BEGIN", "PRAGMA"))

    def committed(_connection: Any) -> None:
        counts["commits"] += 1

    engine = world.database._engine
    event.listen(engine, "before_cursor_execute", executed)
    event.listen(engine, "commit", committed)
    try:
        yield counts
    finally:
        event.remove(engine, "before_cursor_execute", executed)
        event.remove(engine, "commit", committed)
