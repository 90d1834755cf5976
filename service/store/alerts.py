"""SQL of alerts: jobs with which something has lasted too long, and attempts that were lost.

Every statement reads an index of what is live or queued. With a tenant, only the jobs of that tenant are read.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, bindparam, func, literal_column, select, true
from sqlalchemy.orm import Session

from octet.api_schemas import AttemptState, FailureReason
from octet.service.db.tables import AttemptRow, CheckpointRow, JobRow

_JOB = (JobRow.id, JobRow.name, JobRow.pool)
_LIVE = [state for state in AttemptState if not state.is_terminal]


class LateJob(NamedTuple):
    """A job, and the moment since which it waits, is silent or has no checkpoint."""

    id: str
    name: str
    pool: str
    since: datetime


def queued_before(session: Session, pools: Sequence[str], before: datetime, tenant: str | None) -> list[LateJob]:
    """Find the longest-waiting job of each of these pools, where it was queued before a moment."""
    found = []
    for pool in pools:
        row = session.execute(_LONGEST_WAITING.where(_is_of(tenant)).limit(1), {"pool": pool, "before": before}).first()
        found += [LateJob(*row)] if row is not None else []
    return found


def silent_since(session: Session, before: datetime, tenant: str | None, limit: int) -> list[LateJob]:
    """List live jobs whose ranks last reported before a moment, the longest silent first."""
    query = (
        select(*_JOB, AttemptRow.last_report_at)
        .join(AttemptRow, AttemptRow.job_id == JobRow.id)
        .where(AttemptRow.state.in_(_LIVE), AttemptRow.last_report_at < before, _is_of(tenant))
        .order_by(AttemptRow.last_report_at)
        .limit(limit)
    )
    return [LateJob(id_, name, pool, at) for id_, name, pool, at in session.execute(query) if at is not None]


class UnsavedJob(NamedTuple):
    """A live job with its spec's training section, and when it began or its last checkpoint was complete."""

    job: LateJob
    training: dict[str, Any]


def saved_before(session: Session, before: datetime, tenant: str | None) -> list[UnsavedJob]:
    """List live jobs with their last checkpoint, or without one their start, before a moment; the oldest first."""
    newest = select(func.max(CheckpointRow.created_at)).where(CheckpointRow.job_id == JobRow.id).scalar_subquery()
    since = func.coalesce(newest, JobRow.started_at)
    query = (
        select(*_JOB, since, JobRow.spec)
        .join(AttemptRow, AttemptRow.job_id == JobRow.id)
        .where(AttemptRow.state.in_(_LIVE), AttemptRow.last_report_at.is_not(None), since < before, _is_of(tenant))
        .order_by(since)
    )
    return [UnsavedJob(LateJob(*columns), spec["training"]) for *columns, spec in session.execute(query)]


def count_lost(session: Session, after: datetime, until: datetime) -> int:
    """Count attempts whose lease ran out, by the time at which they ended."""
    query = select(func.count()).where(
        AttemptRow.state == AttemptState.FAILED,
        AttemptRow.reason == FailureReason.LEASE_EXPIRED,
        AttemptRow.finished_at > after,
        AttemptRow.finished_at <= until,
    )
    return session.scalar(query) or 0


def _is_of(tenant: str | None) -> ColumnElement[bool]:
    return true() if tenant is None else JobRow.tenant == tenant


# The literal lets SQLite use the index of queued jobs; it does not for a bound parameter.
_LONGEST_WAITING = (
    select(*_JOB, JobRow.queued_at)
    .where(JobRow.state == literal_column("'queued'"), JobRow.pool == bindparam("pool"), JobRow.queued_at < bindparam("before"))
    .order_by(JobRow.queued_at)
)
