"""Waiting in tests: on a condition, never for a time.

The limit only ends a test that hangs. Nothing comes near it, not even on a machine with ten times as much work as cores.
"""

import time
from collections.abc import Callable
from typing import Any

LONG_S = 600.0
"""Seconds until a wait gives up."""
WHOLE_RUN_S = 3600.0
"""The same for a process that compiles, or that runs a whole benchmark: minutes of work, which other load makes many."""


def wait_until(condition: Callable[[], Any], *, timeout_s: float = LONG_S, poll_s: float = 0.01) -> None:
    """Wait until the condition is true. Raises AssertionError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {timeout_s:g} s"
        time.sleep(poll_s)
