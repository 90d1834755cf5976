"""SQL about jobs, attempts and events.

A transaction that changes a job locks its row first (`lock_job`, `lock_attempt`). That puts all writes about one job in
order: event numbers have no gaps, and two transitions never race.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, bindparam, delete, func, literal_column, select
from sqlalchemy.orm import Session

from octet.api_schemas import Blame, DesiredState, FailureReason, JobState, JsonScalar
from octet.service.db.bulk import Rows, Transaction, connection_of, run, write_together
from octet.service.db.tables import (
    AttemptRow,
    Base,
    DeletedJobRow,
    EvaluationRow,
    EventRow,
    IdempotencyKeyRow,
    JobLabelRow,
    JobRow,
)
from octet.service.logs import bound_fields
from octet.service.store import tallies, use
from octet.service.store.curves import CurvePlace
from octet.service.store.ids import new_id, new_ids

IDEMPOTENCY_KEPT = timedelta(hours=24)
SERVICE = "octet"
"""The actor of events that the service causes by itself."""


@dataclass(frozen=True)
class Head:
    """The progress of a job: whether it is over, the numbers of its last event and log line, and the end of its curve."""

    is_over: bool
    last_event_seq: int
    last_log_seq: int
    curve: CurvePlace


def find_job(session: Session, job_id: str, tenant: str | None = None) -> JobRow | None:
    """Find a job. With a tenant, only one of that tenant."""
    job = session.get(JobRow, job_id)
    return job if job is None or tenant in (None, job.tenant) else None


def find_jobs(session: Session, job_ids: Collection[str], tenant: str | None = None) -> list[JobRow]:
    """Find jobs by their ids, in no order. With a tenant, only those of that tenant."""
    found = session.scalars(select(JobRow).where(JobRow.id.in_(job_ids))) if job_ids else ()
    return [job for job in found if tenant in (None, job.tenant)]


class NewestJob(NamedTuple):
    """The id that sorts last of all jobs, None before the first; and PostgreSQL's clock, None on SQLite."""

    id: str | None
    read_at: datetime | None


def newest_job(transaction: Transaction) -> NewestJob:
    """Read what has to be known to add jobs, in one statement."""
    connection = connection_of(transaction)
    clock = "NULL" if connection.dialect.name == "sqlite" else "clock_timestamp()"
    return NewestJob(*run(connection, f"SELECT max(id), {clock} FROM {JobRow.__tablename__}")[0])


def lock_job(session: Session, job_id: str) -> JobRow | None:
    """Find a job and lock it: no other transaction writes about it until this one ends."""
    return session.scalars(_JOB_TO_WRITE, {"id": job_id}).one_or_none()


def find_attempt(session: Session, attempt_id: str) -> AttemptRow | None:
    return session.get(AttemptRow, attempt_id)


def lock_attempt(session: Session, attempt_id: str) -> tuple[JobRow, AttemptRow] | None:
    """Find an attempt and its job and lock both, the job first; every transaction locks in this order."""
    job_id = session.scalar(_JOB_OF_ATTEMPT, {"id": attempt_id})
    if job_id is None:
        return None
    job = lock_job(session, job_id)
    attempt = session.scalars(_ATTEMPT_TO_WRITE, {"id": attempt_id}).one_or_none()
    return None if job is None or attempt is None else (job, attempt)  # another transaction may have deleted them


def attempts_with_jobs(session: Session, attempt_ids: Sequence[str]) -> dict[str, tuple[JobRow, AttemptRow]]:
    """Read attempts and their jobs, by attempt, as they are in the database now. They must be locked."""
    rows = session.execute(_ATTEMPTS_WITH_JOBS, {"ids": attempt_ids})
    return {attempt.id: (job, attempt) for job, attempt in rows}


# Every report and every decision of the dispatcher begins with these. To build one costs more than to execute it.
_FRESH = {"populate_existing": True}
_JOB_TO_WRITE = select(JobRow).where(JobRow.id == bindparam("id")).with_for_update().execution_options(**_FRESH)
_JOB_OF_ATTEMPT = select(AttemptRow.job_id).where(AttemptRow.id == bindparam("id"))
_ATTEMPT_TO_WRITE = select(AttemptRow).where(AttemptRow.id == bindparam("id")).with_for_update().execution_options(**_FRESH)


_ATTEMPTS_WITH_JOBS = (
    select(JobRow, AttemptRow)
    .join(AttemptRow, AttemptRow.job_id == JobRow.id)
    .where(AttemptRow.id.in_(bindparam("ids", expanding=True)))
    .execution_options(**_FRESH)
)


class NewJob(NamedTuple):
    """A job to add to the queue. spec_text: its spec as JSON. cloned_from: the job whose spec it took.

    traceparent: the span of the request. actor: who submitted it.
    """

    id: str
    name: str
    tenant: str
    pool: str
    workers: int
    min_workers: int | None
    priority: int
    level: str
    spec_text: str
    labels: dict[str, str]
    created_at: datetime
    cloned_from: str | None
    traceparent: str | None
    actor: str


def add_jobs(transaction: Transaction, jobs: Sequence[NewJob], now: datetime) -> None:
    """Add new jobs with their labels and first events."""
    events: list[tuple[Any, ...]] = []
    rows: list[tuple[Any, ...]] = []
    for job, event_id in zip(jobs, new_ids("evt", now, len(jobs)), strict=True):
        *others, _, created_at, cloned_from, traceparent, actor = job
        rows.append((*others, created_at, created_at, traceparent))
        origin = f", as a clone of {cloned_from}" if cloned_from is not None else ""
        message = f"accepted into pool {job.pool!r} with priority {job.priority}{origin}"
        events.append((event_id, job.id, now, message, actor))
    labels = [(job.id, key, value) for job in jobs for key, value in job.labels.items()]
    write_together(transaction, [(_NEW_JOBS, rows), (_LABELS, labels), (_FIRST_EVENTS, events)])


def put_labels(session: Session, job_id: str, labels: Mapping[str, str | None]) -> None:
    """Set these labels of a job, and delete those that are None."""
    session.execute(delete(JobLabelRow).where(JobLabelRow.job_id == job_id, JobLabelRow.key.in_(labels)))
    session.add_all(JobLabelRow(job_id=job_id, key=key, value=value) for key, value in labels.items() if value is not None)


_TABLES = Base.metadata.tables
_OF_ALL_NEW: dict[str, str | int | None] = {
    "state": JobState.QUEUED.value,
    "desired": DesiredState.RUN.value,
    "num_attempts": 0,
    "num_failures": 0,
    "num_platform_failures": 0,
    "last_event_seq": 1,
    "last_log_seq": 0,
}
_OF_SOME = {
    *("id", "name", "tenant", "pool", "workers", "min_workers", "priority", "level", "spec", "created_at", "queued_at"),
    "traceparent",
}
_NEW_JOBS = Rows(
    _TABLES[JobRow.__tablename__],
    as_text=["spec"],
    always={
        column.name: _OF_ALL_NEW.get(column.name)
        for column in _TABLES[JobRow.__tablename__].columns
        if column.name not in _OF_SOME
    },
)
_LABELS = Rows(_TABLES[JobLabelRow.__tablename__])
_FIRST_EVENTS = Rows(
    _TABLES[EventRow.__tablename__], always={"seq": 1, "type": "job.accepted", "attempt_id": None, "data": "{}"}
)


def delete_job(session: Session, job: JobRow, now: datetime) -> None:
    """Delete a job with all that is stored about it, and note that its folder has to go too. The job must be locked.

    Idempotency keys stay: a late repetition of its submission must not bring it back.
    """
    tallies.note_deleted(session, job.id)
    use.note_deleted(session, job, now)
    attempt_ids = select(AttemptRow.id).where(AttemptRow.job_id == job.id)
    for table in reversed(Base.metadata.sorted_tables):
        if any(key.references(_TABLES[AttemptRow.__tablename__]) for key in table.foreign_keys):
            session.execute(delete(table).where(table.c.attempt_id.in_(attempt_ids)))
        elif any(key.references(_TABLES[JobRow.__tablename__]) for key in table.foreign_keys):
            session.execute(delete(table).where(table.c.job_id == job.id))
    session.delete(job)
    note_deleted(session, job.id, now)


def note_deleted(session: Session, job_id: str, now: datetime) -> None:
    """Note that a deleted job may have a folder."""
    session.merge(DeletedJobRow(job_id=job_id, deleted_at=now))


def deleted_jobs(session: Session, limit: int) -> list[str]:
    """List deleted jobs that may still have a folder, oldest first."""
    query = select(DeletedJobRow.job_id).order_by(DeletedJobRow.deleted_at).limit(limit)
    return list(session.scalars(query))


def forget_deleted(session: Session, job_ids: Sequence[str]) -> None:
    """Forget deleted jobs whose folders are gone."""
    session.execute(delete(DeletedJobRow).where(DeletedJobRow.job_id.in_(job_ids)))


def attempts_of(session: Session, job_id: str) -> list[AttemptRow]:
    return list(session.scalars(select(AttemptRow).where(AttemptRow.job_id == job_id).order_by(AttemptRow.epoch)))


def current_attempts(session: Session, jobs: Sequence[JobRow]) -> dict[str, AttemptRow]:
    """Find the last attempt of each job that had one; by job id."""
    ids = [job.current_attempt_id for job in jobs if job.current_attempt_id is not None]
    if not ids:
        return {}
    return {attempt.job_id: attempt for attempt in session.scalars(select(AttemptRow).where(AttemptRow.id.in_(ids)))}


def heads(session: Session, job_ids: Collection[str]) -> dict[str, Head]:
    """Find how far each job is; by job id."""
    rows = session.execute(_HEADS, {"ids": list(job_ids)})
    return {
        job_id: Head(state.is_terminal, event_seq, log_seq, CurvePlace(*end))
        for job_id, state, event_seq, log_seq, *end in rows
    }


_TRAINED = select(func.max(AttemptRow.epoch)).where(AttemptRow.job_id == JobRow.id, AttemptRow.resumed_from_step.is_not(None))
_EVALUATED = select(func.max(EvaluationRow.step)).where(EvaluationRow.job_id == JobRow.id)
_HEADS = select(
    JobRow.id,
    JobRow.state,
    JobRow.last_event_seq,
    JobRow.last_log_seq,
    func.coalesce(_TRAINED.correlate(JobRow).scalar_subquery(), 0),
    func.coalesce(JobRow.step, 0),
    func.coalesce(_EVALUATED.correlate(JobRow).scalar_subquery(), 0),
).where(JobRow.id.in_(bindparam("ids", expanding=True)))


def acting(log_fields: Mapping[str, str]) -> str:
    """Return who acts where log lines have these fields."""
    return log_fields.get("principal", SERVICE)


def add_event(
    session: Session,
    job: JobRow,
    now: datetime,
    type_: str,
    message: str,
    *,
    attempt_id: str | None = None,
    data: dict[str, JsonScalar] | None = None,
) -> EventRow:
    """Add the job's next event, in the transaction of the change it reports. The job must be locked.

    Its actor is the principal of the request that is being answered; the service itself if there is none.
    """
    job.last_event_seq += 1
    event = EventRow(
        id=new_id("evt", now),
        job_id=job.id,
        seq=job.last_event_seq,
        at=now,
        type=type_,
        attempt_id=attempt_id,
        message=message,
        data=data or {},
        actor=acting(bound_fields()),
    )
    session.add(event)
    return event


def events_after(session: Session, job_id: str, seq: int, limit: int) -> list[EventRow]:
    query = select(EventRow).where(EventRow.job_id == job_id, EventRow.seq > seq).order_by(EventRow.seq).limit(limit)
    return list(session.scalars(query))


def find_idempotency_key(session: Session, tenant: str, key: str, now: datetime) -> IdempotencyKeyRow | None:
    query = select(IdempotencyKeyRow).where(*_is_key(tenant, key), IdempotencyKeyRow.expires_at > now)
    return session.scalar(query.execution_options(populate_existing=True))


class TakenKey(NamedTuple):
    """The use of an idempotency key, as it is stored."""

    tenant: str
    key: str
    body_hash: str
    job_id: str
    expires_at: datetime


def take_idempotency_keys(transaction: Transaction, keys: Sequence[TakenKey], now: datetime) -> set[str]:
    """Take the keys that are not in use; returns the jobs that have theirs. No key comes twice.

    Of two transactions that ask at once, the second waits for the first to end. All take keys in the same order, so that
    none waits for one that waits for it.
    """
    forget_idempotency_keys(transaction, now)
    return {job_id for (job_id,) in _TAKEN_KEYS.execute(transaction, sorted(keys))}


def _is_key(tenant: str, key: str) -> tuple[ColumnElement[bool], ...]:
    return IdempotencyKeyRow.tenant == tenant, IdempotencyKeyRow.key == key


def forget_idempotency_keys(transaction: Transaction, now: datetime) -> None:
    """Delete the keys that have expired."""
    connection_of(transaction).execute(_EXPIRED_KEYS, {"now": now})


_EXPIRED_KEYS = delete(IdempotencyKeyRow).where(IdempotencyKeyRow.expires_at <= bindparam("now"))
_TAKEN_KEYS = Rows(_TABLES[IdempotencyKeyRow.__tablename__], then="ON CONFLICT DO NOTHING RETURNING job_id")


def newest_failures(
    session: Session, job_id: str, blame: Blame, limit: int
) -> list[tuple[FailureReason | None, int | None, int | None]]:
    """List reason, resumed_from_step and last_step of the job's newest failed attempts with this blame, newest first."""
    query = select(AttemptRow.reason, AttemptRow.resumed_from_step, AttemptRow.last_step)
    reasons = [reason for reason in FailureReason if reason.blame is blame]
    query = query.where(AttemptRow.job_id == job_id, AttemptRow.reason.in_(reasons))
    rows = session.execute(query.order_by(AttemptRow.epoch.desc()).limit(limit))
    return [(reason, resumed_from_step, last_step) for reason, resumed_from_step, last_step in rows]


def measured_to_planned(session: Session, pool: str, limit: int = 100) -> tuple[list[float], list[float]]:
    """Return measured over planned bytes of a pool's newest jobs that have both, and of the same jobs those of step times."""
    columns = (JobRow.measured_to_planned, JobRow.step_time_to_planned)
    query = select(*columns).where(JobRow.pool == pool, JobRow.measured_to_planned.is_not(None))
    found = session.execute(query.order_by(JobRow.id.desc()).limit(limit)).all()
    return [ratio for ratio, _ in found if ratio is not None], [ratio for _, ratio in found if ratio is not None]


def jobs_to_show(session: Session, since: datetime, limit: int) -> list[tuple[str, datetime | None]]:
    """List jobs that had an attempt and either live or ended after `since`, each with its end; newest first."""
    columns = (JobRow.id, JobRow.finished_at)
    # By a bare id SQLite would walk all jobs in this order until enough have ended lately, in place of the index of ends.
    by_id = JobRow.id.concat("").desc()
    newest = (select(*columns).where(*kind).order_by(by_id).limit(limit) for kind in _to_show(since))
    jobs = [(job_id, finished_at) for query in newest for job_id, finished_at in session.execute(query)]
    return sorted(jobs, reverse=True)[:limit]


def count_jobs_to_show(session: Session, since: datetime) -> int:
    counts = (select(func.count()).select_from(JobRow).where(*kind) for kind in _to_show(since))
    return sum(session.scalar(count) or 0 for count in counts)


def _to_show(since: datetime) -> tuple[tuple[ColumnElement[bool], ...], ...]:
    """Select the jobs that live and those that ended: two conditions, because no index serves both."""
    had_attempt = JobRow.current_attempt_id.is_not(None)
    return (had_attempt, JobRow.finished_at.is_(None)), (had_attempt, JobRow.finished_at > since)


def oldest_queued(session: Session, pools: Iterable[str]) -> dict[str, datetime]:
    """When the longest-waiting job was queued, for each of these pools that has one."""
    oldest = {pool: session.scalar(_OLDEST_QUEUED, {"pool": pool}) for pool in pools}
    return {pool: since for pool, since in oldest.items() if since is not None}


# The literal lets SQLite use the index of queued jobs; it does not for a bound parameter.
_OLDEST_QUEUED = select(func.min(JobRow.queued_at)).where(
    JobRow.state == literal_column("'queued'"), JobRow.pool == bindparam("pool")
)
