"""Batches that are applied together take few statements, and leave what each leaves alone."""

import random
from functools import partial
from typing import Any

import pytest
from sqlalchemy import inspect, select

from octet.api_schemas import EvaluationReport, FinishedReport, JobState, LogReport, PhaseReport, ReportBatch
from octet.service import store
from octet.service.db.tables import AttemptRow, JobRow, ReportStreamRow
from octet.service.errors import InvalidRequest, ServiceError, StaleAttempt
from octet.service.ingest.apply import Applied, apply_all
from octet.service.ingest.batches import SentBatch
from tests.service.invariants import check_invariants
from tests.service.simulation import curve
from tests.service.statements import counted
from tests.service.world import Rank, World, reply_of, started, step

_OWN = {"id", "job_id", "attempt_id", "current_attempt_id", "token_hash", "name", "spec"}


def sent(rank: Rank, *bodies: Any) -> SentBatch:
    return rank.sent(rank.batch(*bodies))


def apply(world: World, *batches: SentBatch) -> list[Applied | ServiceError]:
    """Apply batches in one transaction, as the service does."""
    with world.database.write_rows() as connection:
        return apply_all(connection, batches, world.settings.lease_s, partial(world.database.now, connection))


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
            {each.key: getattr(row, each.key) for each in inspect(type(row)).column_attrs if each.key not in _OWN}
            for row in rows
        ] + points


@pytest.mark.parametrize("num_steps", [0, 3])
def test_many_attempts_take_a_few_statements_and_one_commit(world: World, num_steps: int) -> None:
    ranks = running(world, 4)
    num_locks = 0 if world.database.is_sqlite else 1
    with counted(world) as counts:
        answers = apply(world, *[sent(rank, *map(step, range(1, 1 + num_steps))) for rank in ranks])
    assert [answer.acknowledged_seq for answer in answers if not isinstance(answer, Exception)] == [1 + num_steps] * 4
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
    for number, kind in enumerate(["steps", *KINDS, *random.Random(7).choices(KINDS, k=20)]):
        world.turn(1)
        expected: Any
        try:
            expected = alone.deliver(made(kind, alone, 2 * number + 1))
        except ServiceError as error:
            expected = type(error)
        batch = made(kind, together, 2 * number + 1)
        _, got = apply(world, sent(third), together.sent(batch))
        assert (type(got) if isinstance(got, Exception) else reply_of(got)) == expected, kind
        assert stored(world, alone) == stored(world, together), kind
    check_invariants(world)


def test_batches_of_one_attempt_are_applied_one_after_the_other(world: World) -> None:
    """Each is judged by what the one before it left, also where they share a transaction."""
    job_id, rank = world.start()
    batches = [sent(rank, step(1)), sent(rank, step(2), LogReport(level="INFO", message="a")), sent(rank, step(3))]
    answers = apply(world, *batches, batches[1], sent(rank, FinishedReport(outcome="succeeded")), sent(rank))
    assert [getattr(answer, "acknowledged_seq", type(answer)) for answer in answers] == [2, 4, 5, 5, 6, StaleAttempt]
    assert curve(world, job_id) == [1, 2, 3]
    check_invariants(world)


def test_a_whole_life_fits_into_one_batch(world: World) -> None:
    """The reports before the steps, the steps and the reports after them are written in this order."""
    job_id = world.submit(steps=4)
    world.dispatch()
    rank = world.rank_of(job_id)
    bodies: list[Any] = [LogReport(level="INFO", message="up"), PhaseReport(phase="process_up"), started()]
    bodies += [step(1), EvaluationReport(step=1, loss=1.0, tokens=10), LogReport(level="INFO", message="on"), step(2)]
    (answer,) = apply(world, sent(rank, *bodies, FinishedReport(outcome="succeeded")))
    assert isinstance(answer, Applied)
    assert (answer.acknowledged_seq, answer.finished, list(answer.phase_s)) == (8, True, ["process_up"])
    assert answer.queue_wait_s is not None
    job = world.job(job_id)
    assert job.progress is not None
    assert (job.state, job.progress.step, job.progress.remaining_s) == (JobState.SUCCEEDED, 2, None)
    assert curve(world, job_id) == [1, 2]
    types = [event.type for event in world.events(job_id)]
    assert types.index("attempt.launched") < types.index("attempt.started") < types.index("attempt.succeeded")
    check_invariants(world)


def test_a_refused_batch_changes_nothing(world: World) -> None:
    _, rank = world.start()
    before = stored(world, rank)
    world.turn(3)
    bodies = [step(1), FinishedReport(outcome="succeeded"), LogReport(level="INFO", message="late")]
    with counted(world) as counts:
        (answer,) = apply(world, sent(rank, *bodies))
    assert isinstance(answer, InvalidRequest)
    assert counts["statements"] == 1 + (not world.database.is_sqlite), "it is refused before anything is written"
    assert stored(world, rank) == before


def test_other_ranks_hold_no_lease(world: World) -> None:
    _, rank = world.start(workers=2, pool="h100")
    other = Rank(world, rank.order, rank=1)
    other.send(LogReport(level="INFO", message="up"))
    before = stored(world, rank)[0]
    world.turn(3)
    with counted(world) as counts:
        apply(world, sent(other))
    after = stored(world, rank)[0]
    assert after["last_report_at"] == world.clock.now() != before["last_report_at"]
    assert after["lease_expires_at"] == before["lease_expires_at"]
    assert counts["commits"] == 1
