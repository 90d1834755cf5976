"""Ids: a prefix for the kind, and a ULID in lower case (48 bits of milliseconds, 80 random bits) that sorts by time."""

import os
import re
from datetime import datetime
from typing import Literal

Kind = Literal["job", "att", "evt", "ckpt", "cmp", "exp", "key", "aud"]

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_LENGTH = 26
_PLACES = range(5 * _LENGTH - 10, -1, -10)
_PAIRS = [high + low for high in _CROCKFORD for low in _CROCKFORD]
_AS_BASE_32 = str.maketrans(_CROCKFORD, "0123456789abcdefghijklmnopqrstuv")  # the digits that `int` reads
_PATTERN = re.compile(rf"(job|att|evt|ckpt|cmp|exp|key|aud)_[0-7][{_CROCKFORD}]{{{_LENGTH - 1}}}")


def new_id(kind: Kind, now: datetime, after: str | None = None) -> str:
    """Make a new id. An id made in a later millisecond sorts later.

    after: the last id of this kind. The new one sorts after it, even if the clock was set back since.
    """
    number = (int(now.timestamp() * 1000) << 80) | int.from_bytes(os.urandom(10))
    if after is not None and is_id(kind, after) and number <= (last := _number(after)):
        number = last + 1 + int.from_bytes(os.urandom(8))
    return _text(kind, number)


def new_ids(kind: Kind, now: datetime, number: int, after: str | None = None) -> list[str]:
    """Make several new ids as `new_id` does. Each sorts after the one before it."""
    ids = [new_id(kind, now, after)] if number else []
    last = _number(ids[0]) if ids else 0
    noise = os.urandom(8 * number)
    for begin in range(8, 8 * number, 8):
        last += 1 + int.from_bytes(noise[begin : begin + 8])
        ids.append(_text(kind, last))
    return ids


def _text(kind: Kind, number: int) -> str:
    return f"{kind}_{''.join([_PAIRS[(number >> place) & 1023] for place in _PLACES])}"


def _number(id_: str) -> int:
    return int(id_.rpartition("_")[2].translate(_AS_BASE_32), 32)


def is_id(kind: Kind, text: str) -> bool:
    """True if `text` is a well-formed id of this kind. Anything else must not reach the database or a path."""
    return text.startswith(f"{kind}_") and _PATTERN.fullmatch(text) is not None
