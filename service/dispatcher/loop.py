"""One background loop: runs a step again and again until it is stopped."""

import logging
import random
import threading
from collections.abc import Callable

_LONGEST_BACKOFF_S = 30.0

logger = logging.getLogger(__name__)


class Loop:
    """Runs `step` every `interval_s`, and at once after `wake`. An error is logged, and each further one doubles the pause."""

    def __init__(self, name: str, step: Callable[[], None], interval_s: float) -> None:
        self._name = name
        self._step = step
        self._interval_s = interval_s
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"octet-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self, timeout_s: float) -> None:
        """Stop after the step under way; wait for it for up to `timeout_s`."""
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            self._woken.clear()
            try:
                self._step()
                failures = 0
            except Exception:
                failures += 1
                logger.exception("the %s loop failed, %d in a row; it tries again", self._name, failures)
            if failures:
                self._stopping.wait(min(_LONGEST_BACKOFF_S, 0.5 * 2.0**failures) * random.uniform(0.5, 1.0))
            else:
                self._woken.wait(self._interval_s)
