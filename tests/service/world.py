"""A small world for tests: a database, a clock that is turned by hand, a fake cluster, and ranks that report."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

from octet.api_schemas import (
    AttemptRef,
    FinishedReport,
    Job,
    JobChange,
    JobSpec,
    LaunchOrder,
    Report,
    ReportBatch,
    ReportBody,
    ReportReply,
    StartedReport,
    StepReport,
)
from octet.api_schemas.keys import DEFAULT_TENANT
from octet.service import store
from octet.service.cluster.fake import FakeLauncher
from octet.service.db.engine import Database
from octet.service.db.tables import AttemptRow, EventRow
from octet.service.dispatcher import compare, launch, make_way, orphans, place, plan, release, watch
from octet.service.dispatcher import context as dispatcher_context
from octet.service.dispatcher.context import DispatcherContext, JobPlanner
from octet.service.ingest.apply import Applied, apply_all
from octet.service.ingest.batches import SentBatch, read_batch
from octet.service.jobs import commands, views
from octet.service.settings import Settings
from octet.service.store.job_queries import ShownRow


class TurnedClock:
    """A clock that stands still until it is turned."""

    def __init__(self) -> None:
        self.moment = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)

    def now(self) -> datetime:
        return self.moment

    def turn(self, seconds: float) -> None:
        self.moment += timedelta(seconds=seconds)


class World:
    """Everything but HTTP. `context` belongs to the dispatcher that leads; `restart` kills it, and another takes over."""

    def __init__(
        self,
        database: Database,
        clock: TurnedClock,
        settings: Settings,
        launcher: FakeLauncher,
        spec: JobSpec,
        *,
        leads: bool = True,
    ) -> None:
        self.database, self.clock, self.settings, self.launcher, self.spec = database, clock, settings, launcher, spec
        self.planning: JobPlanner | None = None
        """The planner of every dispatcher; by default each has its own."""
        self.context = DispatcherContext(database, launcher, settings)
        self.deleted: set[str] = set()
        """Jobs that somebody has asked to delete."""
        if leads:
            self.context.lead()

    def new_dispatcher(self) -> DispatcherContext:
        context = DispatcherContext(self.database, self.launcher, self.settings)
        context.planning = self.planning or context.planning
        context.lead()
        return context

    def turn(self, seconds: float) -> None:
        """Let time pass while the dispatcher goes on leading: two renewals, the first for the whole time, stand for many."""
        with patch.object(dispatcher_context, "LEADER_LEASE_S", seconds + dispatcher_context.LEADER_LEASE_S):
            self.renew()
        self.clock.turn(seconds)
        self.renew()

    def renew(self) -> None:
        """Renew the leader's lease."""
        self.context.lead()

    def restart(self) -> None:
        """Kill the leader. Its lease runs out, and another dispatcher leads."""
        self.clock.turn(6)
        self.context = self.new_dispatcher()

    def submit(self, key: str | None = None, **changes: Any) -> str:
        """Submit the spec with some fields changed, such as priority=90 or workers=2, for a tenant."""
        tenant = changes.pop("tenant", DEFAULT_TENANT)
        document = self.spec.model_dump(mode="json")
        workers = changes.pop("workers", 1)
        document["resources"] = {"pool": changes.pop("pool", "cpu"), "workers": workers}
        document["training"]["global_batch_size"] = 4 * workers
        document["training"]["steps"] = changes.pop("steps", 4)
        document["retry"] = {"max_failures": changes.pop("max_failures", 0)}
        spec = JobSpec.model_validate(document | changes)
        with self.database.write() as session:
            return commands.submit(session, spec, key, self.database.now(session), tenant).job.id

    def cancel(self, job_id: str, *, saves: bool = True) -> None:
        with self.database.write() as session:
            commands.cancel(session, job_id, self.database.now(session), saves=saves)

    def pause(self, job_id: str) -> None:
        with self.database.write() as session:
            commands.pause(session, job_id, self.database.now(session))

    def resume(self, job_id: str) -> None:
        with self.database.write() as session:
            commands.resume(session, job_id, self.database.now(session))

    def retry(self, job_id: str, steps: int | None = None) -> None:
        with self.database.write() as session:
            commands.retry(session, job_id, self.database.now(session), steps=steps)

    def change(self, job_id: str, **changes: Any) -> None:
        """Change priority=90, or labels={"team": None}."""
        wanted = JobChange.model_validate(changes)
        with self.database.write() as session:
            commands.change(session, job_id, wanted, self.database.now(session))

    def delete(self, job_id: str) -> None:
        self.deleted.add(job_id)
        with self.database.write() as session:
            commands.delete(session, job_id, self.database.now(session))

    def is_stored(self, job_id: str) -> bool:
        with self.database.read() as session:
            return store.jobs.find_job(session, job_id) is not None

    def dispatch(self, look: Callable[[], object] = lambda: None) -> None:
        """Run every loop of jobs once. look: called after each."""
        self.renew()
        steps = (plan.step, place.step, make_way.reclaim, launch.step, watch.step, release.step)
        for step in (*steps, make_way.grow, make_way.limit, compare.step):
            step(self.context)
            look()

    def drain(self) -> int:
        """Look after the jobs of a server that stops, which places nothing more."""
        self.renew()
        num_live = make_way.drain(self.context)
        watch.step(self.context)
        release.step(self.context)
        return num_live

    def tidy(self) -> None:
        orphans.step(self.context)

    def job(self, job_id: str) -> Job:
        with self.database.read() as session:
            row = store.job_queries.find_job(session, job_id)
            assert row is not None
            return views.job(row, None)

    def attempts(self, job_id: str) -> list[AttemptRow]:
        with self.database.read() as session:
            rows = store.jobs.attempts_of(session, job_id)
            session.expunge_all()
            return rows

    def events(self, job_id: str) -> list[EventRow]:
        with self.database.read() as session:
            rows = store.jobs.events_after(session, job_id, 0, 10_000)
            session.expunge_all()
            return rows

    def all_jobs(self) -> list[ShownRow]:
        with self.database.read() as session:
            return store.job_queries.list_jobs(session, store.job_queries.JobFilter(), 10_000, None)

    def start(self, **changes: Any) -> "tuple[str, Rank]":
        """Submit a job and start its one rank, which then trains."""
        job_id = self.submit(**changes)
        self.dispatch()
        rank = self.rank_of(job_id)
        rank.begin()
        return job_id, rank

    def rank_of(self, job_id: str) -> "Rank":
        """Rank 0 of the job's attempt on the cluster."""
        order = next(order for order in self.launcher.orders.values() if order.job_id == job_id)
        return Rank(self, order)


class Rank:
    """One rank of an attempt: sends its reports in order, as a worker does."""

    def __init__(self, world: World, order: LaunchOrder, rank: int = 0) -> None:
        self.world, self.order, self.rank = world, order, rank
        self.seq = 0

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(attempt_id=self.order.attempt_id, epoch=self.order.epoch)

    def batch(self, *bodies: ReportBody) -> ReportBatch:
        made = [Report(seq=self.seq + 1 + place, at=self.world.clock.now(), body=body) for place, body in enumerate(bodies)]
        self.seq += len(bodies)
        return ReportBatch(epoch=self.order.epoch, rank=self.rank, reports=tuple(made))

    def send(self, *bodies: ReportBody) -> ReportReply:
        return self.deliver(self.batch(*bodies))

    def deliver(self, batch: ReportBatch) -> ReportReply:
        database = self.world.database
        with database.write() as session:
            clock = partial(database.now, session)
            (answer,) = apply_all(session, [self.sent(batch)], self.world.settings.lease_s, clock)
            if isinstance(answer, Exception):
                raise answer
        return reply_of(answer)

    def sent(self, batch: ReportBatch) -> SentBatch:
        """Parse a batch as the service does."""
        return SentBatch(self.order.attempt_id, self.order.token, read_batch(batch.model_dump_json().encode()))

    def begin(self, resumed_from_step: int = 0) -> ReportReply:
        return self.send(started(resumed_from_step))

    def train(self, *steps: int) -> ReportReply:
        return self.send(*[step(number) for number in steps])

    def succeed(self) -> ReportReply:
        return self.send(FinishedReport(outcome="succeeded"))


def reply_of(applied: Applied) -> ReportReply:
    return ReportReply(desired=applied.desired, lease_s=applied.lease_s, acknowledged_seq=applied.acknowledged_seq)


def started(resumed_from_step: int = 0) -> StartedReport:
    return StartedReport(
        resumed_from_step=resumed_from_step,
        node="node-1",
        device="cpu",
        world_size=1,
        num_parameters=1000,
        num_layers_converted=0,
        num_layers_skipped=0,
    )


def step(number: int, loss: float | None = None) -> StepReport:
    return StepReport(
        step=number,
        loss=5.0 / number if loss is None else loss,
        gradient_norm=1.0,
        learning_rate=1e-3,
        tokens=128,
        step_time_s=0.5,
        data_wait_s=0.0,
    )
