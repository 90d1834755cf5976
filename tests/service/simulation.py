"""Simulated crashes and workers: a control plane that dies at a chosen instant, and ranks that live on meanwhile.

A crash is a BaseException, so nothing in the service catches it by accident. After a crash the process's memory is lost
with its `DispatcherContext`, the database holds what was committed, and the cluster goes on.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from octet.api_schemas import (
    AttemptRef,
    CheckpointReport,
    DesiredState,
    FailureReason,
    FinishedReport,
    JobState,
    LaunchOrder,
    ReportBatch,
)
from octet.service import store
from octet.service.cluster.fake import FakeLauncher
from octet.service.db.engine import Database
from octet.service.db.tables import AttemptRow, JobRow
from octet.service.dispatcher import context as dispatcher_context
from octet.service.dispatcher.context import DispatcherContext
from octet.service.errors import ServiceError
from tests.service.world import Rank, TurnedClock, World, started, step

RENEWED_AFTER = timedelta(seconds=3)
"""A lease of five seconds is renewed at this age at the latest."""


class Crash(BaseException):
    """The control plane is killed with SIGKILL at this instant."""


class Fuse:
    """Counts the instants at which a process can die, and burns down at the chosen one. 0 never burns."""

    def __init__(self) -> None:
        self.left = 0
        self.burnt = False

    def set(self, left: int) -> None:
        self.left, self.burnt = left, False

    @contextmanager
    def wet(self) -> Iterator[None]:
        """Keep the fuse from burning inside the block."""
        left, self.left = self.left, 0
        yield
        self.left = left

    def instant(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.burnt = True
            raise Crash


class MortalDatabase(Database):
    """A database whose process can die before or after each commit."""

    fuse: Fuse
    num_writes = 0
    """Transactions that began to write."""

    def by(self, clock: TurnedClock) -> "MortalDatabase":
        """Return this database by another clock. The statements that were compiled for one serve the other too."""
        other = copy.copy(self)
        other._clock = clock
        return other

    @contextmanager
    def write(self) -> Iterator[Session]:
        with super().write() as session:
            yield session
            self.fuse.instant()
        self.fuse.instant()

    @contextmanager
    def _turn_to_write(self) -> Iterator[Engine]:
        self.num_writes += 1
        with super()._turn_to_write() as engine:
            yield engine


class MortalLauncher(FakeLauncher):
    """A launcher whose process can die before or after each call that changes the cluster."""

    fuse: Fuse

    def launch(self, order: LaunchOrder) -> None:
        self.fuse.instant()
        super().launch(order)
        self.fuse.instant()

    def stop(self, ref: AttemptRef, grace_s: float) -> None:
        self.fuse.instant()
        super().stop(ref, grace_s)
        self.fuse.instant()


class MortalWorld(World):
    """A world whose control plane can die at any commit; at those that renew the leader's lease only if asked.

    Unless it is asked, it also leaves out a renewal for which the former one is recent enough.
    """

    database: MortalDatabase
    dies_at_renewals = False
    _leads_until: tuple[DispatcherContext, datetime] | None = None

    def renew(self) -> None:
        if self.dies_at_renewals:
            super().renew()
            return
        lease, now = timedelta(seconds=dispatcher_context.LEADER_LEASE_S), self.clock.now()
        if self._leads_until is not None:
            context, until = self._leads_until
            if context is self.context and until - now >= lease - RENEWED_AFTER:
                return
        with self.database.fuse.wet():
            super().renew()
        self._leads_until = (self.context, now + lease)


class Worker:
    """The one rank of an attempt. It trains two steps at a time, saves each time, and resends what was not acknowledged."""

    def __init__(self, world: World, order: LaunchOrder) -> None:
        self.rank = Rank(world, order)
        self.world, self.order = world, order
        self.steps = order.spec.training.steps
        self.step: int | None = None
        self.unacknowledged: ReportBatch | None = None
        self.is_over = False

    @property
    def is_running(self) -> bool:
        return not self.is_over and self.rank.ref in self.world.launcher.orders

    def advance(self) -> None:
        """Train a little and report it. A refusal ends the worker, as it ends a fenced rank."""
        if not self.is_running:
            return
        if self.unacknowledged is None:
            self.unacknowledged = self._next_batch()
        try:
            reply = self.rank.deliver(self.unacknowledged)
        except ServiceError:
            self._exit()
            return
        self.unacknowledged = None
        if self._said_goodbye:
            self._exit()
        elif reply.desired is not DesiredState.RUN:
            self._said_goodbye = True
            saved = [self._saved()] if reply.desired.saves and self.step else []
            self.unacknowledged = self.rank.batch(*saved, FinishedReport(outcome="cancelled"))

    def die(self, reason: FailureReason = FailureReason.WORKER_LOST) -> None:
        if self.is_running:
            self.world.launcher.exit(self.rank.ref, reason)
        self.is_over = True

    def fail_and_linger(self) -> None:
        """Report a failure without ending, so that the dispatcher has to stop the processes."""
        if self.unacknowledged is None:
            self.is_over = True
            failed = FinishedReport(outcome="failed", reason=FailureReason.WORKER_ERROR)
            self.unacknowledged = self.rank.batch(failed)
        with contextlib.suppress(ServiceError):
            self.rank.deliver(self.unacknowledged)

    _said_goodbye = False

    def _next_batch(self) -> ReportBatch:
        if self.step is None:
            self.step = self.order.checkpoints[0].step if self.order.checkpoints else 0
            return self.rank.batch(started(self.step))
        if self.step >= self.steps:
            self._said_goodbye = True
            return self.rank.batch(FinishedReport(outcome="succeeded"))
        done = range(self.step + 1, min(self.step + 2, self.steps) + 1)
        self.step = done[-1]
        return self.rank.batch(*[step(number) for number in done], self._saved())

    def _saved(self) -> CheckpointReport:
        assert self.step, "a checkpoint is of a step"
        return CheckpointReport(step=self.step, name=f"step_{self.step:010}", num_bytes=1, sha256="0" * 64, loss=1.0)

    def _exit(self) -> None:
        self.world.launcher.exit(self.rank.ref)
        self.is_over = True


class Cluster:
    """The workers of every attempt that was ever launched."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.workers: dict[AttemptRef, Worker] = {}

    def live(self) -> list[Worker]:
        for ref, order in self.world.launcher.orders.items():
            if ref not in self.workers:
                self.workers[ref] = Worker(self.world, order)
        return [worker for worker in self.workers.values() if worker.is_running]


def survive(world: World, act: Callable[[], Any]) -> bool:
    """Call `act`. If the control plane dies in it, start it again and return False."""
    try:
        act()
    except Crash:
        survive(world, world.restart)
        return False
    return True


def settle(world: World, cluster: Cluster, max_rounds: int = 400) -> None:
    """Let time pass and workers work until every job is over and every slot is free. Paused jobs are resumed.

    A round is a second: a worker whose only report was lost and which lingers is stopped after `start_timeout_s`, 300.
    """
    for _ in range(max_rounds):
        world.clock.turn(1)
        survive(world, world.dispatch)
        for worker in cluster.live():
            survive(world, worker.advance)
        for job in world.all_jobs():
            if job.state is JobState.PAUSED:
                survive(world, partial(world.resume, job.id))
        if is_settled(world):
            return
    raise AssertionError(f"not settled after {max_rounds} rounds: {[(job.id, job.state) for job in world.all_jobs()]}")


def is_settled(world: World) -> bool:
    if world.launcher.orders:
        return False
    with world.database.read() as session:
        connection = session.connection()
        open_attempts = connection.execute(select(AttemptRow.id).where(AttemptRow.released_at.is_(None))).all()
        return not open_attempts and all(state.is_terminal for state in connection.scalars(select(JobRow.state)))


def curve(world: World, job_id: str) -> list[int]:
    with world.database.read() as session:
        return [point.step for point in store.curves.points_after(session, job_id, 0, 10_000)]
