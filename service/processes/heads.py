"""Heads of HTTP requests that a connection sends again and again, byte for byte but for the number of bytes that follow.

A parser calls Python for each header, which takes longer than what a report asks for. A head that was parsed once says the
same the next time.
"""

import re
from dataclasses import dataclass
from typing import Self

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)\r\n", re.IGNORECASE)
_END = b"\r\n\r\n"
_MOST_DIGITS = 7


@dataclass(frozen=True)
class Head:
    """The bytes of a head before and after the digits of its Content-Length. `after` ends with the empty line."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, request: bytes) -> Self | None:
        """Return the head of a whole request, which a parser has found to be one; None if it does not end here."""
        end = request.find(_END)
        found = list(_LENGTH.finditer(request, 0, end + 2)) if end >= 0 else []
        if len(found) != 1 or len(request) != end + len(_END) + int(found[0][1]):
            return None
        return cls(request[: found[0].start(1)], request[found[0].end(1) : end + len(_END)])

    def measure(self, received: bytes) -> tuple[int, int] | None:
        """Return the number of bytes of the head with which these bytes begin, and of the body that follows it.

        Returns None if they do not begin with this head, whole.
        """
        if not received.startswith(self.before):
            return None
        begin = len(self.before)
        end = received.find(b"\r", begin, begin + _MOST_DIGITS + 1)
        digits = received[begin:end]
        if end < 0 or not digits.isdigit() or not received.startswith(self.after, end):
            return None
        return end + len(self.after), int(digits)
