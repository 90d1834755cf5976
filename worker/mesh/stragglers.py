"""Find the rank that the others wait for, by the time that each rank computes in a step.

All ranks' steps take equally long, because they meet in collectives. So a rank's own time is its step without its waits in
collectives. Each rank writes its mean into the store every few seconds, and the first rank compares them.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octet.worker.mesh.waits import Waits

PERIOD_S = 5.0
RATIO = 1.3
"""A straggler computes this much longer than the median of the others."""
PATIENCE = 2
"""Periods in a row until a rank is named, so that one slow batch is not enough."""


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for. busy_s: seconds of its own in a step; median_s: the median of the other ranks."""

    rank: int
    busy_s: float
    median_s: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} holds the others up: it computes {self.busy_s:.3g} s in a step, and the median of the other "
            f"ranks {self.median_s:.3g} s"
        )


def find(busy_s: Sequence[float]) -> Straggler | None:
    """Return the slowest of at least two ranks if it is a straggler. busy_s: by rank."""
    rank = max(range(len(busy_s)), key=busy_s.__getitem__)
    median_s = statistics.median(time_s for other, time_s in enumerate(busy_s) if other != rank)
    return Straggler(rank, busy_s[rank], median_s) if busy_s[rank] > RATIO * median_s else None


class Stragglers:
    """One rank's part; on the first rank also the comparison. The thread of the agreement calls `look`."""

    def __init__(self, store: Any, rank: int, num_ranks: int, waits: Waits, period_s: float = PERIOD_S) -> None:
        """store: a `torch.distributed.Store`. waits: to which this rank's steps are added."""
        self._store, self._rank, self._num_ranks, self._waits, self._period_s = store, rank, num_ranks, waits, period_s
        self._next_at_s = time.monotonic() + period_s
        self._last: Straggler | None = None
        self._num_seen = 0
        self._news: Straggler | None = None

    def take(self) -> Straggler | None:
        """Return a straggler that was not named yet, once. It is named again after it has kept up for a while."""
        news, self._news = self._news, None
        return news

    def look(self) -> None:
        """Write this rank's time, and on the first rank compare all ranks' times, if a period is over."""
        if time.monotonic() < self._next_at_s:
            return
        self._next_at_s = time.monotonic() + self._period_s
        if (busy_s := self._waits.take_mean_busy()) is not None:
            self._store.set(f"octet/busy/{self._rank}", repr(busy_s))
        keys = [f"octet/busy/{rank}" for rank in range(self._num_ranks)]
        if self._rank == 0 and self._store.check(keys):
            self.compare([float(value) for value in self._store.multi_get(keys)])

    def compare(self, busy_s: Sequence[float]) -> None:
        """Take the ranks' times of a period."""
        found = find(busy_s)
        is_same = found is not None and self._last is not None and found.rank == self._last.rank
        self._num_seen = self._num_seen + 1 if is_same else int(found is not None)
        self._last = found
        if self._num_seen == PATIENCE:
            self._news = found
