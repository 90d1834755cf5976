"""One background loop: runs a step again and again until it is stopped. Nothing that a step raises ends it."""

import logging
import random
import threading
from collections.abc import Callable

from sqlalchemy.exc import OperationalError

from octet.service.telemetry.loops import LoopHealth

_LONGEST_BACKOFF_S = 30.0

logger = logging.getLogger(__name__)


class Loop:
    """Runs `step` every `interval_s`, and at once after `wake`.

    Whatever a step raises is logged and counted, and each further failure doubles the pause. That includes SystemExit, which
    Ray raises in our threads when its own processes are gone.
    """

    def __init__(self, name: str, step: Callable[[], None], interval_s: float, health: LoopHealth | None = None) -> None:
        self._name = name
        self._step = step
        self._interval_s = interval_s
        self._health = health or LoopHealth()
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
        self._health.enter(self._name)
        failures = 0
        while not self._stopping.is_set():
            try:
                self._woken.clear()
                self._step()
                failures = 0
                self._health.progressed()
                self._woken.wait(self._interval_s)
            except BaseException as error:  # noqa: BLE001  nothing that a step raises ends the loop
                failures += 1
                self._health.failed()
                _log(self._name, failures, error)
                self._stopping.wait(min(_LONGEST_BACKOFF_S, 0.5 * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0))
        self._health.leave(self._name)


def _log(name: str, failures: int, error: BaseException) -> None:
    """Log a failure with its trace; that of a database in one line, because all loops fail while it is away."""
    if isinstance(error, OperationalError):
        reason = str(error.orig).partition("\n")[0]
        logger.error("the %s loop failed, %d in a row; it tries again: the database: %s", name, failures, reason)
    else:
        logger.error("the %s loop failed, %d in a row; it tries again", name, failures, exc_info=error)
