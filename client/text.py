"""Write values as people read them. A missing value is a dash."""

import re
from datetime import timedelta

from octet.api_schemas import Pool

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed
_MISSING = "–"


def printable(text: str) -> str:
    """Write control characters out as \\x1b: what a job logs must not steer the reader's terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n")


def number(value: float | None, spec: str = ".4f") -> str:
    return _MISSING if value is None else format(value, spec)


def duration(seconds: float | None) -> str:
    """Write a time as 4.5 s, 2:03 or 1:02:03."""
    if seconds is None:
        return _MISSING
    if seconds < 60:
        return f"{seconds:.1f} s"
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0")


def num_bytes(count: int | None) -> str:
    """Write a size with three digits and a decimal prefix."""
    return _MISSING if count is None else _scaled(count, ["B", "kB", "MB", "GB", "TB", "PB"])


def magnitude(count: int | None) -> str:
    """Write a count with three digits: 859 k, 1.32 G."""
    return _MISSING if count is None else _scaled(count, ["", "k", "M", "G", "T"]).rstrip()


def _scaled(count: int, units: list[str]) -> str:
    size = float(count)
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        units = units[1:]
    return f"{size:.3g} {units[0]}"


def plans_held(pool: Pool) -> str:
    """Say how the plans of a pool's last jobs held; empty before enough jobs were measured."""
    if pool.measured_to_planned is None:
        return ""
    words = f"jobs took {pool.measured_to_planned:.1%} of their planned bytes"
    if pool.step_time_to_planned is not None:
        words += f", steps {pool.step_time_to_planned:.0%} of the middle of their predicted times"
    return words
