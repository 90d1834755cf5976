"""The control plane's own metrics.

Facts of the database are counted at the scrape, so every process shows the same numbers and a restart loses nothing.
What only this process saw (requests, refused writes, waits) is observed as it happens.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Annotated

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.orm import Session
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octet.api_schemas import AttemptState, FailureReason
from octet.service import store
from octet.service.db.engine import Database
from octet.service.jobs.attempts import START_PHASES
from octet.service.settings import Settings
from octet.service.store.tallies import Tallies
from octet.service.telemetry.jobs import JobSeries

_WAITS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 43_200)


class Telemetry:
    """The metrics of one app, in a registry of its own."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.registry = CollectorRegistry()
        self.fenced_writes = Counter(
            "octet_fenced_writes", "reports refused because their attempt is no longer the current one", registry=self.registry
        )
        self._queue_wait = Histogram(
            "octet_job_queue_wait_seconds", "from the queue to a slot", buckets=_WAITS, registry=self.registry
        )
        self._start_overhead = Histogram(
            "octet_job_start_overhead_seconds",
            "time in each phase of an attempt's start",
            ["phase"],
            buckets=_WAITS,
            registry=self.registry,
        )
        for phase in START_PHASES:
            self._start_overhead.labels(phase)  # a series at zero, so that the first one is an increase
        self._requests = Histogram(
            "octet_http_request_duration_seconds",
            "until the answer began",
            ["method", "route", "code"],
            registry=self.registry,
        )
        self._series_of_requests: dict[tuple[str, str, int], Histogram] = {}
        self.process = ProcessTelemetry(self.registry)
        self.registry.register(_DatabaseCollector(settings, database))
        self.registry.register(JobSeries(database))
        ProcessCollector(registry=self.registry)

    def render(self) -> bytes:
        """Render all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def observe_report(self, queue_wait_s: float | None, phase_s: Mapping[str, float]) -> None:
        if queue_wait_s is not None:
            self._queue_wait.observe(queue_wait_s)
        for phase, seconds in phase_s.items():
            self._start_overhead.labels(phase).observe(seconds)

    def observe_request(self, method: str, route: str, code: int, seconds: float) -> None:
        series = self._series_of_requests.get((method, route, code))
        if series is None:  # to find it by its labels takes longer than to observe
            series = self._series_of_requests[method, route, code] = self._requests.labels(method, route, str(code))
        series.observe(seconds)


class TimeRequests:
    """Middleware: measures how long each route takes until it begins to answer."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unmatched")
                method = scope["method"] if route != "unmatched" else "any"
                self._telemetry.observe_request(method, route, message["status"], time.perf_counter() - began)
            await send(message)

        await self._app(scope, receive, timed if scope["type"] == "http" else send)


class _DatabaseCollector(Collector):
    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database

    def describe(self) -> Iterable[Metric]:
        return []  # otherwise registering would collect, and read the database

    def collect(self) -> Iterable[Metric]:
        with self._database.read() as session:
            tallies = store.tallies.read(session)
            return [
                _jobs(tallies),
                self._slots(session),
                _attempts(tallies),
                self._leader(session),
                self._loops(session),
                self._oldest_wait(session),
                self._leases(session),
                self._size(session),
            ]

    def _slots(self, session: Session) -> Metric:
        family = GaugeMetricFamily("octet_pool_slots", "slots: configured, there now, taken", labels=["pool", "kind"])
        present, used = store.queue.slots_present(session), store.queue.slots_used(session)
        for pool in self._settings.pools:
            family.add_metric([pool.name, "configured"], pool.slots)
            family.add_metric([pool.name, "present"], present.get(pool.name, 0))
            family.add_metric([pool.name, "used"], used.get(pool.name, 0))
        return family

    def _leader(self, session: Session) -> Metric:
        held = store.queue.lease_is_held(session, store.queue.LEADER, self._database.now(session))
        return GaugeMetricFamily("octet_dispatcher_leads", "1 while some dispatcher holds the lease", value=float(held))

    def _loops(self, session: Session) -> Metric:
        family = GaugeMetricFamily(
            "octet_dispatcher_loop_stalled", "1 while a loop of the dispatcher that leads makes no progress", labels=["loop"]
        )
        for name, is_stalled in store.queue.loops_stalled(session, self._database.now(session)).items():
            family.add_metric([name], float(is_stalled))
        return family

    def _oldest_wait(self, session: Session) -> Metric:
        family = GaugeMetricFamily(
            "octet_queue_oldest_wait_seconds", "how long the longest-waiting job has waited", labels=["pool"]
        )
        waiting_since = store.jobs.oldest_queued(session, [pool.name for pool in self._settings.pools])
        now = self._database.now(session)
        for pool in self._settings.pools:
            since = waiting_since.get(pool.name, now)
            family.add_metric([pool.name], (now - since).total_seconds())
        return family

    def _leases(self, session: Session) -> Metric:
        family = GaugeMetricFamily(
            "octet_attempt_leases",
            "leases of live attempts: held, or overdue and not yet acted upon",
            labels=["state"],
        )
        held, overdue = store.queue.count_leases(session, self._database.now(session))
        family.add_metric(["held"], held)
        family.add_metric(["overdue"], overdue)
        return family

    def _size(self, session: Session) -> Metric:
        return GaugeMetricFamily(
            "octet_database_size_bytes", "size of the whole database", value=self._database.num_bytes(session)
        )


def _jobs(tallies: Tallies) -> Metric:
    family = GaugeMetricFamily("octet_jobs", "jobs by state and pool", labels=["state", "pool"])
    for (pool, state), count in tallies.jobs.items():
        family.add_metric([state.value, pool], count)
    return family


def _attempts(tallies: Tallies) -> Metric:
    family = CounterMetricFamily("octet_attempts", "attempts that ended", labels=["outcome", "reason"])
    # Also those of deleted jobs: a counter that falls is taken for one that began again, and all of it for an increase.
    kinds = (tallies.attempts, tallies.deleted_attempts)
    endings = {key: sum(kind.get(key, 0) for kind in kinds) for kind in kinds for key in kind if key[0].is_terminal}
    # Endings that never happened are shown as zero, so that the first one is an increase.
    every = [(AttemptState.SUCCEEDED, None), (AttemptState.CANCELLED, None)]
    for outcome, reason in {*endings, *every, *((AttemptState.FAILED, reason) for reason in FailureReason)}:
        family.add_metric([outcome.value, reason.value if reason else ""], endings.get((outcome, reason), 0))
    return family


async def _telemetry(request: Request) -> Telemetry:
    telemetry: Telemetry = request.app.state.telemetry
    return telemetry


TelemetryDep = Annotated[Telemetry, Depends(_telemetry)]


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
