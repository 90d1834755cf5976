"""SQL about comparisons and their children. A transaction that changes a comparison locks its row first, then its jobs'."""

import math
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import bindparam, case, func, literal_column, null, or_, select
from sqlalchemy import delete as sql_delete
from sqlalchemy import update as sql_update
from sqlalchemy.orm import Session

from octet.api_schemas import JobState
from octet.api_schemas.comparison import ComparisonState, OutcomeKind
from octet.service.db.tables import AttemptRow, ComparisonChildRow, ComparisonRow, JobRow
from octet.service.store.queue import hours_of_slots

_OVER = [state for state in JobState if state.is_terminal]


class ChildState(NamedTuple):
    """A child without an outcome, and its job as far as it is known. job: None if it was deleted."""

    child: ComparisonChildRow
    job: JobRow | None

    @property
    def is_alive(self) -> bool:
        """True while the job is not over."""
        return self.job is not None and not self.job.state.is_terminal


def find(session: Session, comparison_id: str, tenant: str | None = None) -> ComparisonRow | None:
    """Find a comparison. With a tenant, only one of that tenant."""
    row = session.get(ComparisonRow, comparison_id)
    return row if row is None or tenant in (None, row.tenant) else None


def lock(session: Session, comparison_id: str) -> ComparisonRow | None:
    """Find a comparison and lock it: no other transaction writes about it until this one ends."""
    return session.scalars(_TO_WRITE, {"id": comparison_id}).one_or_none()


def list_newest(session: Session, tenant: str | None, limit: int, after: str | None) -> list[ComparisonRow]:
    """List comparisons, newest first, starting after the id `after`."""
    query = select(ComparisonRow).order_by(ComparisonRow.id.desc()).limit(limit)
    if tenant is not None:
        query = query.where(ComparisonRow.tenant == tenant)
    return list(session.scalars(query if after is None else query.where(ComparisonRow.id < after)))


class ChildSummary(NamedTuple):
    """A child and the state of its job; None if it was deleted. kind: of its outcome, if that is known."""

    arm: int
    seed: int
    job_id: str
    kind: OutcomeKind | None
    state: JobState | None
    finished_at: datetime | None


def is_child(session: Session, job_id: str) -> bool:
    """Return True for a job that a comparison has queued."""
    return session.scalar(select(ComparisonChildRow.job_id).where(ComparisonChildRow.job_id == job_id)) is not None


def children_of(session: Session, comparison_id: str) -> list[ChildSummary]:
    """List the children of a comparison: by seed, then by arm."""
    return [ChildSummary(*row) for row in session.execute(_CHILDREN, {"id": comparison_id})]


def outcomes_of(session: Session, comparison_id: str, *, has_points: bool) -> list[tuple[int, int, dict[str, Any]]]:
    """Read the outcomes that are known, with arms and seeds. has_points: with the evaluations, which are nearly all of it."""
    if has_points:
        return [(arm, seed, outcome) for arm, seed, outcome in session.execute(_OUTCOMES, {"id": comparison_id})]
    rows = session.execute(_OUTCOMES_WITHOUT_POINTS, {"id": comparison_id})
    return [(arm, seed, {"kind": kind, "why": why, "summary": summary}) for arm, seed, kind, why, summary in rows]


def without_outcome(session: Session, comparison_id: str) -> list[ChildState]:
    """List the children whose outcome is not known, in the order of their jobs' ids."""
    return [ChildState(child, job) for child, job in session.execute(_WITHOUT_OUTCOME, {"id": comparison_id})]


def forget_outcome(session: Session, job_id: str) -> None:
    """Forget the outcome of a job that goes on, in the comparisons that are not over. The caller has locked the job."""
    session.execute(_FORGET, {"child_job_id": job_id})


def to_advance(session: Session, now: datetime) -> list[str]:
    """List the running comparisons that have a child that ended, may queue another one, or have used their budgets.

    The oldest are first.
    """
    found = []
    for comparison_id, spec, queues_more, num_alive, num_ended in session.execute(_RUNNING):
        budget = _number(spec, "budget_slot_hours")
        is_used = budget is not None and slot_hours(session, comparison_id, now) >= budget
        if num_ended or is_used or (queues_more and num_alive < (_number(spec, "at_once") or math.inf)):
            found.append(comparison_id)
    return found


def slot_hours(session: Session, comparison_id: str, now: datetime) -> float:
    """Add up the hours for which the attempts of a comparison's children have had slots, for each slot."""
    return hours_of_slots(session.execute(_ATTEMPTS, {"id": comparison_id}), now)


def _number(spec: Any, name: str) -> float | None:
    """Read a number of a stored comparison. One that lacks what it needs is advanced, which says what is wrong with it."""
    value = spec.get(name) if isinstance(spec, dict) else None
    return value if isinstance(value, int | float) else None


def end(row: ComparisonRow, state: ComparisonState, message: str, now: datetime) -> None:
    """Write that a comparison is over."""
    row.state, row.message, row.finished_at, row.queues_more = state, message, now, False


def delete(session: Session, row: ComparisonRow) -> None:
    """Delete a comparison with what it knows of its children."""
    session.execute(sql_delete(ComparisonChildRow).where(ComparisonChildRow.comparison_id == row.id))
    session.delete(row)


# The loop of the dispatcher executes this every second.
_IS_ENDED = or_(JobRow.id.is_(None), JobRow.state.in_(_OVER))
_WAITED_FOR = ComparisonChildRow.job_id.is_not(None) & ComparisonChildRow.outcome.is_(None)
_RUNNING = (
    select(
        ComparisonRow.id,
        ComparisonRow.spec,
        ComparisonRow.queues_more,
        func.coalesce(func.sum(case((_WAITED_FOR & ~_IS_ENDED, 1), else_=0)), 0),
        func.coalesce(func.sum(case((_WAITED_FOR & _IS_ENDED, 1), else_=0)), 0),
    )
    .outerjoin(ComparisonChildRow, ComparisonChildRow.comparison_id == ComparisonRow.id)
    .outerjoin(JobRow, JobRow.id == ComparisonChildRow.job_id)
    .where(ComparisonRow.state == literal_column("'running'"))  # not a parameter, so that the index is used
    .group_by(ComparisonRow.id)
    .order_by(ComparisonRow.id)
)
_TO_WRITE = (
    select(ComparisonRow).where(ComparisonRow.id == bindparam("id")).with_for_update().execution_options(populate_existing=True)
)
_OF_COMPARISON = ComparisonChildRow.comparison_id == bindparam("id")
_ATTEMPTS = (
    select(AttemptRow.workers, AttemptRow.created_at, AttemptRow.finished_at)
    .join(ComparisonChildRow, ComparisonChildRow.job_id == AttemptRow.job_id)
    .where(_OF_COMPARISON)
)
_KIND = ComparisonChildRow.outcome["kind"].as_string()
_CHILDREN = (
    select(ComparisonChildRow.arm, ComparisonChildRow.seed, ComparisonChildRow.job_id, _KIND, JobRow.state, JobRow.finished_at)
    .outerjoin(JobRow, JobRow.id == ComparisonChildRow.job_id)
    .where(_OF_COMPARISON)
    .order_by(ComparisonChildRow.seed, ComparisonChildRow.arm)
)
_HAS_OUTCOME = (_OF_COMPARISON, ComparisonChildRow.outcome.is_not(None))
_OUTCOMES = select(ComparisonChildRow.arm, ComparisonChildRow.seed, ComparisonChildRow.outcome).where(*_HAS_OUTCOME)
_OUTCOMES_WITHOUT_POINTS = select(
    ComparisonChildRow.arm,
    ComparisonChildRow.seed,
    _KIND,
    ComparisonChildRow.outcome["why"].as_string(),
    ComparisonChildRow.outcome["summary"],
).where(*_HAS_OUTCOME)
_NOT_OVER = select(ComparisonRow.id).where(ComparisonRow.state.in_([each for each in ComparisonState if not each.is_terminal]))
_FORGET = (
    sql_update(ComparisonChildRow)
    .where(ComparisonChildRow.comparison_id.in_(_NOT_OVER), ComparisonChildRow.job_id == bindparam("child_job_id"))
    .values(outcome=null())
    .execution_options(synchronize_session=False)
)
_WITHOUT_OUTCOME = (
    select(ComparisonChildRow, JobRow)
    .outerjoin(JobRow, JobRow.id == ComparisonChildRow.job_id)
    .where(_OF_COMPARISON, ComparisonChildRow.outcome.is_(None))
    .order_by(ComparisonChildRow.job_id)
    .execution_options(populate_existing=True)
)
