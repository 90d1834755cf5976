"""Metrics of one process of the control plane: the lag of its event loop, and the time that transactions take."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_INTERVAL_S = 0.25

logger = logging.getLogger(__name__)


class ProcessTelemetry:
    """The metrics of this process, in the registry of its app."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            "octet_event_loop_lag_seconds", "how late the event loop ran a timer", buckets=_LAGS, registry=registry
        )
        self._transactions = Histogram(
            "octet_database_transaction_duration_seconds",
            "until committed or rolled back, with the wait for the one writer of SQLite",
            ["kind"],
            buckets=_LAGS,
            registry=registry,
        )
        self._errors = Counter(
            "octet_database_errors", "transactions that the database refused or broke", ["kind"], registry=registry
        )
        for kind in ("read", "write"):
            self._errors.labels(kind)
        info = Gauge("octet_build_info", "1; the version that runs", ["version"], registry=registry)
        info.labels(version("octet-fp8")).set(1)

    def observe_transaction(self, kind: str, seconds: float, broke: bool) -> None:
        self._transactions.labels(kind).observe(seconds)
        if broke:
            self._errors.labels(kind).inc()

    @asynccontextmanager
    async def watching_the_loop(self) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch())
        watch.add_done_callback(_say_if_it_failed)
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self._lag.observe(max(0.0, time.perf_counter() - due))


def _say_if_it_failed(watch: "asyncio.Task[None]") -> None:
    if not watch.cancelled():
        logger.error("the lag of the event loop is measured no longer", exc_info=watch.exception())
