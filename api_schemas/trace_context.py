"""The trace that a request and its job belong to, in the form of W3C Trace Context, level 1: the header `traceparent`.

    00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
    version, trace id, span id of the caller, flags

Nothing here is sent to a collector of traces: ids are read, passed on and logged, so that one id finds all lines about a job.
"""

import re
import secrets
from dataclasses import dataclass, replace
from typing import Self

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_KNOWN_FLAGS = 0b11
"""Sampled, and of level 2 random. Others are not passed on."""
_SAMPLED = 0b01


@dataclass(frozen=True)
class TraceContext:
    """A span of a trace. trace_id: 32 hexadecimal digits, span_id: 16; neither is all zeros."""

    trace_id: str
    span_id: str
    flags: int = _SAMPLED

    @classmethod
    def parse(cls, header: str) -> Self | None:
        """Read a `traceparent`. None for one that the specification has a reader ignore.

        A version after 00 may have further parts, which are not read; version ff is none.
        """
        found = _FORM.fullmatch(header)
        if found is None:
            return None
        version, trace_id, span_id, flags, rest = found.groups()
        if version == "ff" or (version == "00" and rest is not None) or not int(trace_id, 16) or not int(span_id, 16):
            return None
        return cls(trace_id, span_id, int(flags, 16) & _KNOWN_FLAGS)

    @classmethod
    def begin(cls) -> Self:
        """Begin a trace. It counts as sampled, so that instruments in a rank which follow their parent record it."""
        return cls(secrets.token_hex(16), secrets.token_hex(8))

    def child(self) -> Self:
        """Return a span of its own within the trace."""
        return replace(self, span_id=secrets.token_hex(8))

    @property
    def header(self) -> str:
        """Write it as a `traceparent` of version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"
