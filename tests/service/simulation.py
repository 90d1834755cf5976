"""Simulated crashes and workers: a control plane that dies at a chosen instant, and ranks that live on meanwhile.

A crash is a BaseException, so nothing in the service catches it by accident. After a crash the process's memory is lost
with its `DispatcherContext`, the database holds what was committed, and the cluster goes on.
"""

import contextlib
import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from api_schemas import (
    AttemptRef,
    AttemptState,
    CheckpointReport,
    DesiredState,
    FailureReason,
    FinishedReport,
    JobState,
    LaunchOrder,
    ReportBatch,
)
from service import store
from service.cluster.fake import FakeLauncher
from service.db.engine import Database
from service.db.tables import AttemptRow, EventRow, JobRow, LogLineRow
from service.errors import ServiceError
from tests.service.world import Rank, TurnedClock, World, started, step


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
    """A world whose control plane can die at any commit; at those that renew the leader's lease only if asked."""

    database: MortalDatabase
    dies_at_renewals = False

    def renew(self) -> None:
        with contextlib.nullcontext() if self.dies_at_renewals else self.database.fuse.wet():
            super().renew()


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
        elif reply.desired is DesiredState.CANCEL:
            self._said_goodbye = True
            self.unacknowledged = self.rank.batch(FinishedReport(outcome="cancelled"))

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
        save = CheckpointReport(step=self.step, name=f"step_{self.step:010}", num_bytes=1, sha256="0" * 64, loss=1.0)
        return self.rank.batch(*[step(number) for number in done], save)

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
    """Let time pass and workers work until every job is over and every slot is free.

    A round is a second: a worker whose only report was lost and which lingers is stopped after `start_timeout_s`, 300.
    """
    for _ in range(max_rounds):
        world.clock.turn(1)
        survive(world, world.dispatch)
        for worker in cluster.live():
            survive(world, worker.advance)
        if is_settled(world):
            return
    raise AssertionError(f"not settled after {max_rounds} rounds: {[(job.id, job.state) for job in world.all_jobs()]}")


def is_settled(world: World) -> bool:
    with world.database.read() as session:
        open_attempts = session.scalars(select(AttemptRow.id).where(AttemptRow.released_at.is_(None))).all()
        states = session.scalars(select(JobRow.state)).all()
    return not open_attempts and all(state.is_terminal for state in states) and not world.launcher.orders


def check_invariants(world: World) -> None:
    """Check what must hold at every instant, no matter what died."""
    with world.database.read() as session:
        events = numbers_by_job(session, EventRow.job_id, EventRow.seq)
        lines = numbers_by_job(session, LogLineRow.job_id, LogLineRow.seq)
        attempts: dict[str, list[AttemptRow]] = defaultdict(list)
        held: Counter[str] = Counter()
        for attempt in session.scalars(select(AttemptRow).order_by(AttemptRow.epoch)):
            attempts[attempt.job_id].append(attempt)
            held[attempt.pool] += attempt.workers * (attempt.released_at is None)
        for job in session.scalars(select(JobRow)):
            assert events[job.id] == list(range(1, job.last_event_seq + 1)), "event numbers have gaps"
            assert lines[job.id] == list(range(1, job.last_log_seq + 1)), "log numbers have gaps"
            check_attempts(world, job, attempts[job.id])
        assert all(held[pool.name] <= pool.slots for pool in world.settings.pools), "more slots are given than there are"
        check_tallies(session)


def check_tallies(session: Session) -> None:
    """Check that the kept counts are those of the rows."""
    tallies = store.tallies.read(session)
    assert tallies.jobs == Counter(tuple(row) for row in session.execute(select(JobRow.pool, JobRow.state)))
    assert tallies.attempts == Counter(tuple(row) for row in session.execute(select(AttemptRow.state, AttemptRow.reason)))


def check_attempts(world: World, job: JobRow, attempts: list[AttemptRow]) -> None:
    """Check that a job's attempts, in the order of their epochs, fit to its state and to each other."""
    assert [attempt.epoch for attempt in attempts] == list(range(1, job.num_attempts + 1))
    live = [attempt for attempt in attempts if not attempt.state.is_terminal]
    assert len(live) == (job.state in {JobState.STARTING, JobState.RUNNING, JobState.CANCELLING})
    assert all(attempt is attempts[-1] for attempt in live)
    assert all(attempt.state.is_terminal for attempt in attempts if attempt.released_at is not None)
    assert (job.state is JobState.RUNNING) <= any(attempt.state is AttemptState.RUNNING for attempt in live)
    assert (job.finished_at is not None) == job.state.is_terminal
    processes = [attempt for attempt in attempts if is_alive(world, attempt)]
    assert len(processes) <= 1, "two attempts of a job may train at once"


def numbers_by_job(session: Session, job_id: Any, number: Any) -> dict[str, list[int]]:
    """List the numbers of a table's rows in order, by job."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for owner, value in session.execute(select(job_id, number).order_by(number)):
        numbers[owner].append(value)
    return numbers


def is_alive(world: World, attempt: AttemptRow) -> bool:
    """True if the attempt has processes, and its lease is not over, so that they have not stopped themselves."""
    lease_is_over = attempt.lease_expires_at is not None and attempt.lease_expires_at < world.clock.now()
    return world.launcher.is_running(AttemptRef(attempt_id=attempt.id, epoch=attempt.epoch)) and not lease_is_over


def curve(world: World, job_id: str) -> list[int]:
    with world.database.read() as session:
        return [point.step for point in store.curves.points_after(session, job_id, 0, 10_000)]
