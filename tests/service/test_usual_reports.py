"""Heartbeats and steps are applied together with few statements, and leave what `reports.apply` leaves."""

import random
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from api_schemas import EvaluationReport, FinishedReport, LogReport, ReportBatch
from service import store
from service.db.tables import AttemptRow, JobRow, ReportStreamRow
from service.errors import ServiceError
from service.jobs.report_batches import ReportBatches
from service.jobs.usual_reports import SentBatch, apply_usual
from tests.service.invariants import check_invariants
from tests.service.statements import counted
from tests.service.world import Rank, World, step

_OWN = {"id", "job_id", "attempt_id", "current_attempt_id", "token_hash", "name", "spec"}


def sent(rank: Rank, *bodies: Any) -> SentBatch:
    return SentBatch(rank.order.attempt_id, rank.order.token, rank.batch(*bodies))


def running(world: World, num_jobs: int) -> list[Rank]:
    return [world.start(name=f"job-{number}", pool="h100")[1] for number in range(num_jobs)]


def stored(world: World, rank: Rank) -> Any:
    """Everything that reports may change of an attempt, without what differs between attempts."""
    with world.database.read() as session:
        attempt = session.get(AttemptRow, rank.order.attempt_id)
        job = session.get(JobRow, rank.order.job_id)
        points = [
            point._replace(attempt_id="")._asdict()
            for point in store.curves.points_after(session, rank.order.job_id, 0, 10_000)
        ]
        streams = session.scalars(select(ReportStreamRow).where(ReportStreamRow.attempt_id == rank.order.attempt_id))
        rows = [attempt, job, *sorted(streams, key=lambda row: row.rank)]
        return [
            {column.name: getattr(row, column.name) for column in row.__table__.columns if column.name not in _OWN}
            for row in rows
        ] + points


@pytest.mark.parametrize("num_steps", [0, 3])
def test_many_attempts_take_a_few_statements_and_one_commit(world: World, num_steps: int) -> None:
    ranks, batches = running(world, 4), ReportBatches(world.database, world.settings.lease_s)
    num_locks = 0 if world.database.is_sqlite else 1
    with counted(world) as counts:
        answers = batches._apply_all([sent(rank, *map(step, range(1, 1 + num_steps))) for rank in ranks])
    assert [answer.reply.acknowledged_seq for answer in answers if not isinstance(answer, Exception)] == [1 + num_steps] * 4
    # How they stand, and who was heard; for steps also the jobs, streams and curves, with PostgreSQL in the same statement.
    assert counts == {"statements": num_locks + 2 + 3 * (num_steps > 0 and world.database.is_sqlite), "commits": 1}
    check_invariants(world)


SHIFTS = {"gap": 1, "again": -2, "overlapping": -1}
KINDS = [
    "heartbeat",
    "steps",
    *SHIFTS,
    "evaluated",
    "log",
    "old epoch",
    "no such rank",
    "not finite",
    "backwards",
    "in the curve",
]


def made(kind: str, rank: Rank, first_step: int) -> ReportBatch:
    """Make a rank's next batch."""
    bodies: list[Any] = [step(first_step), step(first_step + 1)]
    if kind == "heartbeat":
        bodies = []
    elif kind == "evaluated":
        bodies.append(EvaluationReport(step=first_step, loss=1.0, tokens=10))
    elif kind == "log":
        bodies = [LogReport(level="INFO", message="a line")]
    elif kind == "not finite":
        bodies[1] = bodies[1].model_copy(update={"loss": None, "step_time_s": 0.0})
    elif kind == "backwards":
        bodies.reverse()
    elif kind == "in the curve":
        bodies = [step(1, loss=first_step), step(first_step)]
    before = rank.seq
    batch = rank.batch(*bodies)
    if kind in SHIFTS:
        shifted = tuple(report.model_copy(update={"seq": report.seq + SHIFTS[kind]}) for report in batch.reports)
        batch, rank.seq = batch.model_copy(update={"reports": shifted}), before + (kind == "overlapping")
    if kind in {"old epoch", "no such rank"}:
        batch, rank.seq = batch.model_copy(update={"epoch": 2} if kind == "old epoch" else {"rank": 1}), before
    return batch


def test_the_result_is_that_of_reports_applied_alone(world: World) -> None:
    """Two attempts send the same: one alone, one together with a third. Answers and rows are equal at each moment."""
    alone, together, third = running(world, 3)
    batches = ReportBatches(world.database, world.settings.lease_s)
    for number, kind in enumerate(["steps", *KINDS, *random.Random(7).choices(KINDS, k=20)]):
        world.turn(1)
        expected: Any
        try:
            expected = alone.deliver(made(kind, alone, 2 * number + 1))
        except ServiceError as error:
            expected = type(error)
        batch = made(kind, together, 2 * number + 1)
        _, got = batches._apply_all([sent(third), SentBatch(together.order.attempt_id, together.order.token, batch)])
        assert (type(got) if isinstance(got, Exception) else got.reply) == expected, kind
        assert stored(world, alone) == stored(world, together), kind
    check_invariants(world)


def test_what_has_to_be_decided_is_left_alone(world: World) -> None:
    for why in ("token", "workers", "over", "twice", "not heard", "another kind", "backwards", "again"):
        batches = to_decide(world, why)
        with world.database.write() as session:
            assert apply_usual(session, batches, 60.0, lambda _: world.clock.now()) == {}, why


def to_decide(world: World, why: str) -> list[SentBatch]:
    """What an attempt of its own sent that may not be applied unseen."""
    _, rank = world.start(name=why.replace(" ", "-"), pool="h100")
    one = sent(rank, LogReport(level="INFO", message="a line")) if why == "another kind" else sent(rank)
    if why in {"backwards", "again"}:
        rank.train(1, 2)
        one = sent(rank, *map(step, (4, 3) if why == "backwards" else (2, 3)))
    elif why == "token":
        one = replace(one, token="wrong")
    elif why == "workers":
        one = replace(one, batch=ReportBatch(epoch=1, rank=1))
    elif why == "over":
        rank.send(FinishedReport(outcome="failed"))
    elif why == "not heard":
        with world.database.write() as session:
            attempt = store.jobs.find_attempt(session, one.attempt_id)
            assert attempt is not None
            attempt.last_report_at = None
    return [one, one] if why == "twice" else [one]


def test_other_ranks_hold_no_lease(world: World) -> None:
    _, rank = world.start(workers=2, pool="h100")
    other = Rank(world, rank.order, rank=1)
    other.send(LogReport(level="INFO", message="up"))
    before = stored(world, rank)[0]
    world.turn(3)
    with counted(world) as counts:
        ReportBatches(world.database, world.settings.lease_s)._apply_all([sent(other)])
    after = stored(world, rank)[0]
    assert after["last_report_at"] == world.clock.now() != before["last_report_at"]
    assert after["lease_expires_at"] == before["lease_expires_at"]
    assert counts["commits"] == 1
