"""SQL of the jobs that are shown: columns in place of rows of the ORM, with the current attempt's in the same statement."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, Text, bindparam, cast, select
from sqlalchemy.orm import Session

from octet.api_schemas import DesiredState, FailureReason, JobState
from octet.service.db.tables import AttemptRow, JobLabelRow, JobRow
from octet.service.store.jobs import NewJob


class ShownRow(NamedTuple):
    """A job with the spec as text, because to parse it takes longer than all else, and the start of its current attempt.

    The fields with defaults are those that a new job does not have yet.
    """

    id: str
    name: str
    tenant: str
    state: JobState
    desired: DesiredState
    pool: str
    priority: int
    spec_text: str
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    reason: FailureReason | None = None
    message: str | None = None
    summary: dict[str, Any] | None = None
    current_attempt_id: str | None = None
    num_ranks: int | None = None
    num_attempts: int = 0
    num_failures: int = 0
    num_platform_failures: int = 0
    failures: dict[str, Any] | None = None
    step: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    remaining_s: float | None = None
    reported_at: datetime | None = None
    steps: int | None = None
    placed_at: datetime | None = None
    process_up_at: datetime | None = None
    torch_imported_at: datetime | None = None
    model_built_at: datetime | None = None
    first_step_at: datetime | None = None
    warmed_up_at: datetime | None = None
    plan: dict[str, Any] | None = None
    measured_to_planned: float | None = None
    traceparent: str | None = None
    step_time_to_planned: float | None = None


@dataclass(frozen=True)
class JobFilter:
    """Which jobs to list. An empty field does not restrict."""

    states: Sequence[JobState] = ()
    pool: str | None = None
    name: str | None = None
    tenant: str | None = None
    labels: Sequence[tuple[str, str]] = ()


def shown_as_new(job: NewJob) -> ShownRow:
    """Return the row of a job that was just added, as `find_job` would read it."""
    given = (job.id, job.name, job.tenant, JobState.QUEUED, DesiredState.RUN, job.pool, job.priority, job.spec_text)
    return ShownRow(*given, job.created_at, traceparent=job.traceparent)


def find_job(session: Session, job_id: str, tenant: str | None = None) -> ShownRow | None:
    """Find a job. With a tenant, only one of that tenant."""
    found = session.connection().execute(_ONE, {"id": job_id}).first()
    row = None if found is None else ShownRow(*found)
    return row if row is None or tenant in (None, row.tenant) else None


def list_jobs(session: Session, wanted: JobFilter, limit: int, after: str | None) -> list[ShownRow]:
    """List jobs, newest first, starting after the id `after`. Ids sort by the time they were made."""
    given = {"states": list(wanted.states) or None, "pool": wanted.pool, "name": wanted.name}
    given |= {"tenant": wanted.tenant, "after": after}
    parameters: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    statement = _page(frozenset(parameters), len(wanted.labels))
    parameters["limit"] = limit
    for number, (key, value) in enumerate(wanted.labels):
        parameters |= {f"key_{number}": key, f"value_{number}": value}
    return [ShownRow(*row) for row in session.connection().execute(statement, parameters)]


_OTHERS: dict[str, Any] = {"spec_text": cast(JobRow.spec, Text), "num_ranks": AttemptRow.workers}
"""Columns that have another name in their table."""
_COLUMNS = [
    _OTHERS[name] if name in _OTHERS else getattr(JobRow if hasattr(JobRow, name) else AttemptRow, name)
    for name in ShownRow._fields
]
_SHOWN: Select[Any] = select(*_COLUMNS).outerjoin(AttemptRow, AttemptRow.id == JobRow.current_attempt_id)
_ONE = _SHOWN.where(JobRow.id == bindparam("id"))


_CONDITIONS: dict[str, ColumnElement[bool]] = {
    "after": JobRow.id < bindparam("after"),
    "states": JobRow.state.in_(bindparam("states", expanding=True)),
    "pool": JobRow.pool == bindparam("pool"),
    "name": JobRow.name == bindparam("name"),
    "tenant": JobRow.tenant == bindparam("tenant"),
}


@lru_cache(maxsize=256)
def _page(conditions: frozenset[str], num_labels: int) -> Select[Any]:
    """Build the statement of a page once for each kind of filter: to build it costs more than to execute it."""
    query = _SHOWN.where(*[_CONDITIONS[name] for name in sorted(conditions)])
    for number in range(num_labels):
        has_label = (JobLabelRow.key == bindparam(f"key_{number}"), JobLabelRow.value == bindparam(f"value_{number}"))
        query = query.where(JobRow.id.in_(select(JobLabelRow.job_id).where(*has_label)))
    return query.order_by(JobRow.id.desc()).limit(bindparam("limit"))
