"""Streams, and what each of them knows to have happened: the order in which a device may run what the host gives it.

A device runs its streams in any order that waits and events allow. Instead of trying a few of these orders, each stream has a
vector clock (Lamport 1978; the race detectors of threads work in the same way): two accesses are in order only if one stream
knew of the other's when it began. An order that no event enforces is a fault, whichever of the two came first in this run.
"""

import sys
from functools import cache
from pathlib import Path

ROOT = str(Path(__file__).parents[2])


class Fault(AssertionError):
    """A GPU would compute something else here, wait, hang or fail. kind: the fault's name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Timeline:
    """The work of one stream of a device, or of the host, in order."""

    num_made = 0

    def __init__(self, name: str, *, is_noted: bool = True) -> None:
        """is_noted: others have to wait for what it does; else something that the chip does not see makes them wait."""
        self.name, self.number, self.is_noted = name, Timeline.num_made, is_noted
        Timeline.num_made += 1
        self.clock: dict[int, int] = {self.number: 0}
        """By the number of each timeline, how far this one knows it to be."""

    def knows(self, number: int, time: int) -> bool:
        """Return True if a moment of a timeline comes before all that this one does from now on."""
        return self.clock.get(number, 0) >= time

    def join(self, clock: dict[int, int]) -> None:
        """Let all that comes from now on wait for what another timeline knew."""
        for number, time in clock.items():
            if time > self.clock.get(number, 0):
                self.clock[number] = time

    def tick(self) -> int:
        """Begin another piece of work. Returns its time."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def __str__(self) -> str:
        return self.name


def place() -> str:
    """Return the file and line of the worker that runs, or else the test's."""
    frame, of_test = sys._getframe(1), "?"
    while frame is not None:
        name = short_name(frame.f_code.co_filename)
        if name.startswith("worker/"):
            return f"{name}:{frame.f_lineno}"
        if name and of_test == "?":
            of_test = f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return of_test


@cache
def short_name(path: str) -> str:
    """Return the name of a file of ours, of the worker or a test; else nothing."""
    if not path.startswith(ROOT) or "site-packages" in path:
        return ""
    name = path.removeprefix(ROOT).lstrip("/").removeprefix("octet/")
    is_chip = name.startswith("tests/chip/") and not name.startswith("tests/chip/test_")
    return "" if is_chip else name
