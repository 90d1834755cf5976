"""What a rank waits for. Every collective says so while it blocks, and other threads may read it at any time."""

import time
from collections import Counter
from types import TracebackType

import torch

from worker.errors import CollectiveFailed

DEVICE = "device"
"""In place of an axis: the rank waits for its own device, which may wait for other ranks."""
_OF_THIS_RANK = (torch.OutOfMemoryError, torch.AcceleratorError)


class Waits:
    """The collectives of one rank: which one it is in, how many it has started, how long it has waited in all of them."""

    def __init__(self) -> None:
        self.step = 0
        """Optimizer steps that this rank has taken."""
        self.current: Call | None = None
        self.failed: Call | None = None
        """The collective that failed."""
        self.waited_s = 0.0
        self.num_started: Counter[str] = Counter()
        """Collectives that this rank has started, by axis."""

    def call(self, collective: str, axis: str, num_bytes: int = 0) -> "Call":
        """Count a collective of so many bytes. The result is a context manager for each part of it that may block."""
        self.num_started[axis] += 1
        return Call(self, f"{collective} of {num_bytes:,} bytes" if num_bytes else collective, axis, self.num_started[axis])


class Call:
    """One collective of a rank. Inside, the rank waits for the others; an error of the backend becomes CollectiveFailed."""

    def __init__(self, waits: Waits, collective: str, axis: str, number: int) -> None:
        """collective: its name and size. number: of this rank's collectives on the axis, from 1."""
        self.collective, self.axis, self.number = collective, axis, number
        self.since_s = 0.0
        """When the rank began to wait, by `time.monotonic`."""
        self._waits = waits

    def __str__(self) -> str:
        return f"{self.collective} over {self.axis} (number {self.number} there)"

    def __enter__(self) -> None:
        self.since_s = time.monotonic()
        self._waits.current = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._waits.waited_s += time.monotonic() - self.since_s
        self._waits.current = None
        if isinstance(error, RuntimeError) and self.axis != DEVICE and not isinstance(error, _OF_THIS_RANK):
            self._waits.failed = self
            raise CollectiveFailed(f"{self} failed: {error}") from error
