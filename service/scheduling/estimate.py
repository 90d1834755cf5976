"""Estimates when a queued job starts at the latest. Pure: the slots that it lacks and those that come back in, seconds out.

It assumes that running jobs go on as fast as they did last, and that jobs ahead in the queue keep the slots which they get. An
attempt that ends early lets the others start sooner; one whose job is tried again may delay them.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from octet.service.store.queue import Release

GRANULARITY_S = 10
"""Estimates are rounded up to this, so that a list of waiting jobs does not change with every step of those that run."""


def starts_in_s(missing: int, releases: Iterable[Release]) -> float | None:
    """Return the seconds after which so many slots more are free. None: measured attempts do not give back enough."""
    left, in_s = missing, 0.0
    for end_s, slots in sorted((each.in_s, each.slots) for each in releases if each.in_s is not None):
        if left <= 0:
            break
        left, in_s = left - slots, max(0.0, end_s)
    return in_s if left <= 0 else None


def starts_at(missing: int, releases: Iterable[Release], now: datetime) -> datetime | None:
    """Return the moment by which so many slots more are free, which is never before now. None if it is not known."""
    in_s = starts_in_s(missing, releases)
    if in_s is None:
        return None
    at_s = -(-(now + timedelta(seconds=in_s)).timestamp() // GRANULARITY_S) * GRANULARITY_S
    return datetime.fromtimestamp(at_s, UTC)
