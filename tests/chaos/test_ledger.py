"""The ledger finds each fault that is planted in a clean database."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session

from octet.api_schemas import AttemptState, DesiredState, FailureReason, JobState
from octet.service import store
from octet.service.db.tables import AttemptRow, Base, EventRow, JobRow, LogLineRow
from octet.service.store.curves import Point
from tests.chaos.ledger import Curve, Findings, audit

BEGAN = datetime(2026, 1, 31, 12, tzinfo=UTC)
CURVE: Curve = [(1, 3.0, None), (2, 2.0, None), (3, 1.5, 1.6)]
ACCEPTED = {"storm-0": "job_0"}


@pytest.fixture
def session() -> Iterator[Session]:
    """A database in memory with one job: its first attempt saved step 1 and died after step 2, the second finished."""
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(job("job_0", "storm-0"))
        session.flush()
        session.add_all([attempt(1, 0, AttemptState.FAILED), attempt(2, 1, AttemptState.SUCCEEDED)])
        session.flush()
        store.curves.put_points(session, "job_0", [point(1, 1), point(2, 2), point(3, 2)])
        session.add_all(
            EventRow(id=f"evt_{seq}", job_id="job_0", seq=seq, at=BEGAN, type="x", message="", data={}) for seq in (1, 2)
        )
        session.add(LogLineRow(job_id="job_0", seq=1, at=BEGAN, attempt_id="att_1", rank=0, level="INFO", message=""))
        session.flush()
        yield session
    engine.dispose()


def job(id_: str, name: str) -> JobRow:
    return JobRow(
        id=id_,
        name=name,
        state=JobState.SUCCEEDED,
        desired=DesiredState.RUN,
        pool="cpu",
        workers=1,
        priority=50,
        spec={"training": {"steps": 3}},
        created_at=BEGAN,
        queued_at=BEGAN,
        finished_at=BEGAN + timedelta(minutes=5),
        num_attempts=2 * (id_ == "job_0"),
        last_event_seq=2 * (id_ == "job_0"),
        last_log_seq=1 * (id_ == "job_0"),
    )


def attempt(epoch: int, resumed_from_step: int, state: AttemptState) -> AttemptRow:
    over_at = BEGAN + timedelta(minutes=epoch)
    return AttemptRow(
        id=f"att_{epoch}",
        job_id="job_0",
        epoch=epoch,
        state=state,
        pool="cpu",
        workers=1,
        created_at=over_at - timedelta(seconds=50),
        finished_at=over_at - timedelta(seconds=5),
        released_at=over_at,
        resumed_from_step=resumed_from_step,
    )


def point(step: int, epoch: int) -> Point:
    _, loss, evaluation_loss = CURVE[step - 1]
    return Point(
        step=step,
        at=BEGAN,
        attempt_id=f"att_{epoch}",
        loss=loss,
        gradient_norm=None,
        learning_rate=1e-3,
        tokens=64,
        step_time_s=0.1,
        data_wait_s=0.0,
        evaluation_loss=evaluation_loss,
        evaluation_metrics=None if evaluation_loss is None else {},
    )


def the_job(session: Session) -> JobRow:
    return session.scalars(select(JobRow).where(JobRow.id == "job_0")).one()


def the_attempt(session: Session, epoch: int) -> AttemptRow:
    return session.scalars(select(AttemptRow).where(AttemptRow.epoch == epoch)).one()


def test_a_clean_database_has_no_findings(session: Session) -> None:
    assert audit(session, ACCEPTED, {1: CURVE}).wrong() == {}


def store_a_job_twice(session: Session) -> None:
    session.add(job("job_1", "storm-0"))


def leave_a_job_running(session: Session) -> None:
    the_job(session).state = JobState.RUNNING


def keep_slots(session: Session) -> None:
    the_attempt(session, 2).released_at = None


def place_too_early(session: Session) -> None:
    the_attempt(session, 2).created_at = BEGAN + timedelta(seconds=57)


def forget_an_attempt(session: Session) -> None:
    the_job(session).num_attempts = 3


def keep_a_step_of_the_first_attempt(session: Session) -> None:
    store.curves.put_points(session, "job_0", [point(2, 1)])


def credit_a_step_to_the_later_attempt(session: Session) -> None:
    store.curves.put_points(session, "job_0", [point(1, 2)])


def drop_a_step(session: Session) -> None:
    store.curves.drop_after(session, "job_0", 1)
    store.curves.put_points(session, "job_0", [point(3, 2)])


def skip_an_event(session: Session) -> None:
    session.scalars(select(EventRow).where(EventRow.seq == 2)).one().seq = 3


def lose_a_log_line(session: Session) -> None:
    session.delete(session.scalars(select(LogLineRow)).one())


def change_a_loss(session: Session) -> None:
    store.curves.put_points(session, "job_0", [point(3, 2)._replace(loss=1.4999)])


def fail_within_the_budgets(session: Session) -> None:
    the_job(session).state, the_job(session).reason = JobState.FAILED, FailureReason.CLUSTER_LOST
    the_job(session).num_platform_failures = 2


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (store_a_job_twice, "doubled"),
        (leave_a_job_running, "stuck"),
        (keep_slots, "stuck"),
        (place_too_early, "overlapping_attempts"),
        (forget_an_attempt, "overlapping_attempts"),
        (keep_a_step_of_the_first_attempt, "steps_counted_twice"),
        (credit_a_step_to_the_later_attempt, "steps_counted_twice"),
        (drop_a_step, "steps_missing"),
        (skip_an_event, "gaps_in_events"),
        (lose_a_log_line, "gaps_in_logs"),
        (change_a_loss, "curves_that_differ"),
        (fail_within_the_budgets, "unexplained_failures"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_fault_is_found(session: Session, plant: Callable[[Session], None], kind: str) -> None:
    plant(session)
    session.flush()
    findings: Findings = audit(session, ACCEPTED, {1: CURVE})
    assert len(getattr(findings, kind)) == 1, findings
    assert findings.by_kind()[kind.replace("_", " ")] == getattr(findings, kind)


@pytest.mark.parametrize(("lease_ended_before_s", "is_found"), [(6, False), (4, True)])
def test_an_attempt_without_a_lease_ends_before_it_is_released(
    session: Session, lease_ended_before_s: int, is_found: bool
) -> None:
    """Its ranks have ended by themselves by then, and whatever they report is refused."""
    placed_at = BEGAN + timedelta(seconds=57)
    the_attempt(session, 2).created_at = placed_at
    the_attempt(session, 1).lease_expires_at = placed_at - timedelta(seconds=lease_ended_before_s)
    session.flush()
    findings = audit(session, ACCEPTED, {1: CURVE}, lease_grace=timedelta(seconds=5))
    assert bool(findings.overlapping_attempts) is is_found


def test_a_job_that_is_not_there_is_lost(session: Session) -> None:
    assert audit(session, ACCEPTED | {"storm-9": "job_9"}, {1: CURVE}).lost == ["storm-9: job_9"]
