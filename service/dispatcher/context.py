"""The context of the dispatcher's loops: database, cluster, leadership, and transactions that only the leader can commit."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, Protocol, TypeVar

from sqlalchemy.orm import Session

from octet.api_schemas import JobSpec, PoolConfig
from octet.api_schemas.job_plan import JobPlan
from octet.service import store
from octet.service.cluster.launcher import Launcher
from octet.service.db.engine import Database
from octet.service.jobs.planning import Planning
from octet.service.settings import Settings
from octet.service.telemetry.loops import LoopHealth

LEADER_LEASE_S = 5.0

Item = TypeVar("Item")

logger = logging.getLogger(__name__)


class NotLeading(Exception):
    """Another dispatcher leads, so the transaction was not committed."""


def holder_of(pid: int) -> str:
    """The name under which a process of this machine leads."""
    return f"{socket.gethostname()}:{pid}"


@dataclass
class Outage:
    """Logs once that the cluster does not answer, and once that it answers again."""

    clock: Callable[[], float] = time.monotonic
    _since: float | None = None

    def begins(self, error: Exception) -> None:
        if self._since is None:
            self._since = self.clock()
            logger.warning("nothing is placed until the cluster answers: %s", error)

    def ends(self) -> None:
        if self._since is not None:
            logger.info("the cluster answers again, after %.1f s", self.clock() - self._since)
            self._since = None


class JobPlanner(Protocol):
    """Makes the plans by which jobs are placed, elsewhere."""

    def plan_job(self, job: JobSpec, pool: PoolConfig) -> "Future[JobPlan]": ...
    def close(self) -> None: ...


class AskedPlan(NamedTuple):
    """A plan that is made. asked_s: when it was asked for, by the context's monotonic clock."""

    spec: JobSpec
    pool: str
    plan: "Future[JobPlan]"
    asked_s: float


class FailedItem(NamedTuple):
    """An item of a step that raised. due_s: when it is tried again, by the context's monotonic clock."""

    num_failures: int
    due_s: float


@dataclass
class DispatcherContext:
    """The context of the loops. `leads_since` is None while another dispatcher leads."""

    database: Database
    launcher: Launcher
    settings: Settings
    wake: Callable[[], None] = lambda: None
    executor: Executor | None = None
    holder: str = field(default_factory=lambda: holder_of(os.getpid()))
    leads_since: datetime | None = None
    outage: Outage = field(default_factory=Outage)
    health: LoopHealth = field(default_factory=LoopHealth)
    room_since: dict[str, datetime] = field(default_factory=dict)
    slots_without_device: dict[str, int] = field(default_factory=dict)
    """Since when an elastic job's attempt could have more ranks, by its id."""
    planning: JobPlanner = None  # type: ignore[assignment]
    """By default a planner of its own, which starts nothing before the first plan."""
    asked_plans: dict[str, AskedPlan] = field(default_factory=dict)
    unplanned_since_s: dict[str, float] = field(default_factory=dict)
    """Since when each queued job without a plan is known, by its id."""
    failed_comparisons: dict[str, FailedItem] = field(default_factory=dict)
    """The comparisons that raised when they were last advanced, by id."""
    monotonic: Callable[[], float] = time.monotonic
    _token: str | None = None

    def __post_init__(self) -> None:
        self.planning = self.planning or Planning(self.settings)

    def lead(self) -> None:
        """Take or renew the leader's lease, and write until when our loops have to make progress.

        A new leader breaks the claims of the former leader, and forgets its loops.
        """
        with self.database.write() as session:
            now = self.database.now(session)
            token = store.queue.take_lease(session, store.queue.LEADER, self.holder, self._token, LEADER_LEASE_S, now)
            is_new = token is not None and token != self._token
            if is_new:
                store.queue.break_claims(session)
                store.queue.forget_loops(session)
            if token is not None:
                store.queue.note_loops(session, self.holder, token, self.health.seconds_left(), now)
        if is_new:
            logger.info("%s leads", self.holder)
            self.leads_since = now
        elif token is None and self._token is not None:
            self.resign()
        elif self.leads_since is not None and self.leads_since > now:
            self.leads_since = now  # the clock was set back; deadlines would not be enforced until it is there again
        self._token = token

    def resign(self) -> None:
        """Stop acting as leader. The lease in the database stays as it is."""
        logger.warning("%s leads no longer", self.holder)
        self._token, self.leads_since = None, None

    def end_lease_of(self, holder: str) -> None:
        """End the leader's lease if `holder` has it, which never renews it again."""
        with self.database.write() as session:
            store.queue.end_lease_of(session, store.queue.LEADER, holder, self.database.now(session))

    def give_up(self) -> None:
        """Hand the lease back, so that another dispatcher can lead at once."""
        if self._token is not None:
            with self.database.write() as session:
                store.queue.give_up_lease(session, store.queue.LEADER, self._token, self.database.now(session))
            self._token, self.leads_since = None, None

    @contextmanager
    def write(self) -> Iterator[tuple[Session, datetime]]:
        """Open a write transaction and yield it with its time. Raises NotLeading, and writes nothing, if another leads."""
        with self.database.write() as session:
            now = self.database.now(session)
            if self._token is None or not store.queue.holds_lease(session, store.queue.LEADER, self._token, now):
                raise NotLeading
            yield session, now

    def each(self, do: Callable[[Item], None], items: Iterable[Item]) -> None:
        """Call `do` with every item, in parallel if there is an executor.

        The first error is raised at the end, and the others are logged. Each item that ends well is progress of the loop.
        """
        if self.executor is None:
            for item in items:
                do(item)
            return
        errors = []
        for future in [self.executor.submit(do, item) for item in items]:
            error = future.exception()
            if error is None:
                self.health.progressed()
            else:
                errors.append(error)
        for error in errors[1:]:
            if not isinstance(error, NotLeading):
                logger.error("one more item failed in the same step", exc_info=error)
        if errors:
            raise errors[0]
