"""Globs over relative paths, matched in time that grows with name × glob and never exponentially.

`**/` matches any folders or none, `**` anything, `*` and `?` stay within one part of the path; `**` does not match a line
feed. A match follows all possibilities at once: the positions of the name that the glob's beginning can reach are the bits of
one integer. A backtracking regular expression would need minutes for `**/**/**/…q`, and cannot be interrupted.
"""

import re
from collections.abc import Callable
from functools import lru_cache


class _Name:
    """A name, and sets of its positions: a bit for each character."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._positions: dict[str, int] = {}
        self.slashes = self.positions("/")
        everywhere = (1 << len(name)) - 1
        self.within_parts = everywhere ^ self.slashes
        self.within_lines = everywhere ^ self.positions("\n")

    def positions(self, text: str) -> int:
        """Return the positions at which the text begins."""
        if (known := self._positions.get(text)) is not None:
            return known
        found, start = 0, -1
        while (start := self.name.find(text, start + 1)) >= 0:
            found |= 1 << start
        self._positions[text] = found
        return found


_Step = Callable[[_Name, int], int]
"""A part of a glob: takes a name and the set of positions before the part; returns the set of positions after it."""


def matches(glob: str, name: str) -> bool:
    """Return True if the glob matches the whole name. name: parts separated by '/'."""
    reached, known = 1, _known(name)
    for step in _steps(glob):
        reached = step(known, reached)
        if not reached:
            return False
    return bool(reached >> len(name) & 1)


@lru_cache(maxsize=2)
def _known(name: str) -> _Name:
    """One name is matched with many globs, one after the other."""
    return _Name(name)


@lru_cache(maxsize=1024)
def _steps(glob: str) -> tuple[_Step, ...]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    return tuple(_WILDCARDS.get(part) or _literally(part) for part in parts if part)


def _literally(text: str) -> _Step:
    return lambda name, reached: (reached & name.positions(text)) << len(text)


def _run_on(reached: int, passable: int) -> int:
    """Add the positions that follow a reached one without leaving the passable characters.

    The sum carries from each reached position to the end of its run (MatchStar in Cameron et al., "Bitwise data parallelism
    in regular expression matching", PACT 2014).
    """
    return (((reached & passable) + passable) ^ passable) | reached


_WILDCARDS: dict[str, _Step] = {
    "**/": lambda name, reached: reached | (_run_on(reached, name.within_lines) & name.slashes) << 1,
    "**": lambda name, reached: _run_on(reached, name.within_lines),
    "*": lambda name, reached: _run_on(reached, name.within_parts),
    "?": lambda name, reached: (reached & name.within_parts) << 1,
}
