"""Ids: a prefix for the kind, and a ULID in lower case (48 bits of milliseconds, 80 random bits) that sorts by time."""

import re
import secrets
from datetime import datetime
from typing import Literal

Kind = Literal["job", "att", "evt", "ckpt"]

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_LENGTH = 26
_PATTERN = re.compile(rf"(job|att|evt|ckpt)_[0-7][{_CROCKFORD}]{{{_LENGTH - 1}}}")


def new_id(kind: Kind, now: datetime, after: str | None = None) -> str:
    """Make a new id. An id made in a later millisecond sorts later.

    after: the last id of this kind. The new one sorts after it, even if the clock was set back since.
    """
    number = (int(now.timestamp() * 1000) << 80) | secrets.randbits(80)
    if after is not None and is_id(kind, after) and number <= (last := _number(after)):
        number = last + 1 + secrets.randbits(64)
    digits = [_CROCKFORD[(number >> (5 * place)) & 31] for place in reversed(range(_LENGTH))]
    return f"{kind}_{''.join(digits)}"


def _number(id_: str) -> int:
    number = 0
    for digit in id_.rpartition("_")[2]:
        number = 32 * number + _CROCKFORD.index(digit)
    return number


def is_id(kind: Kind, text: str) -> bool:
    """True if `text` is a well-formed id of this kind. Anything else must not reach the database or a path."""
    return text.startswith(f"{kind}_") and _PATTERN.fullmatch(text) is not None
