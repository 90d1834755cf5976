"""Follow the background loops of this process: their failures, and the moment by which each has to make progress.

A loop makes progress when a step ends well, or when one item of a step does. It may wait for the cluster: the longest call
starts Ray and launches an attempt, two minutes together, so a silent loop counts as stalled after `WAITING_S`. A loop whose
last step raised has only `FAILING_S`. The dispatcher writes these moments into the database (`store.queue`), because the
process that answers `/readyz` can be another one.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

WAITING_S = 300.0
FAILING_S = 60.0


@dataclass
class _Loop:
    progress_at_s: float
    is_failing: bool = False
    num_failures: int = 0


class LoopHealth(Collector):
    """The state of each loop by name. Every method may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loops: dict[str, _Loop] = {}
        self._lock = threading.Lock()
        self._here = threading.local()

    def enter(self, name: str) -> None:
        """Say that the calling thread runs this loop from now on."""
        self._here.name = name
        with self._lock:
            self._loops.setdefault(name, _Loop(self._clock()))

    def leave(self, name: str) -> None:
        """Forget a loop that had to stop, except its failures."""
        with self._lock:
            self._loops[name].progress_at_s = float("inf")

    def progressed(self) -> None:
        """Note that the loop of the calling thread made progress. A thread without a loop changes nothing."""
        name = getattr(self._here, "name", None)
        if name is not None:
            with self._lock:
                self._loops[name].progress_at_s, self._loops[name].is_failing = self._clock(), False

    def failed(self) -> None:
        """Count a step that raised, in the loop of the calling thread."""
        with self._lock:
            loop = self._loops[self._here.name]
            loop.num_failures += 1
            loop.is_failing = True

    def item_failed(self) -> None:
        """Count an item that raised while the others of its step went on. A thread without a loop changes nothing."""
        name = getattr(self._here, "name", None)
        if name is not None:
            with self._lock:
                self._loops[name].num_failures += 1

    def seconds_left(self) -> dict[str, float]:
        """Return the time that each running loop may still go without progress; negative for a loop that is stalled."""
        with self._lock:
            now_s = self._clock()
            return {
                name: loop.progress_at_s + (FAILING_S if loop.is_failing else WAITING_S) - now_s
                for name, loop in self._loops.items()
                if loop.progress_at_s != float("inf")
            }

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "octet_loop_failures", "steps of background loops, or single items of them, that raised", labels=["loop"]
        )
        with self._lock:
            for name, loop in self._loops.items():
                family.add_metric([name], loop.num_failures)
        return [family]
