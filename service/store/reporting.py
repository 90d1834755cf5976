"""SQL of the reports that come most often: heartbeats and steps. Each statement is about many attempts at once.

The rows stay outside the session, so these functions come before anything else of a transaction that reads the same rows.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, BindParameter, bindparam, cast, func, select, update
from sqlalchemy.orm import Session

from api_schemas import AttemptState, DesiredState
from service.db.bulk import Bulk, upsert
from service.db.tables import AttemptRow, Base, JobRow, MetricRow, ReportStreamRow

_ATTEMPTS, _JOBS = Base.metadata.tables[AttemptRow.__tablename__], Base.metadata.tables[JobRow.__tablename__]
_STREAMS, _METRICS = Base.metadata.tables[ReportStreamRow.__tablename__], Base.metadata.tables[MetricRow.__tablename__]


class Standing(NamedTuple):
    """How an attempt stands with one of its ranks, as far as it decides about reports."""

    attempt_id: str
    job_id: str
    epoch: int
    state: AttemptState
    workers: int
    token_hash: bytes | None
    has_reported: bool
    desired: DesiredState
    num_steps: int | None
    last_seq: int


_IDS: BindParameter[Any] = bindparam("ids", expanding=True)
_LOCK = (
    select(AttemptRow.id)
    .join(JobRow, JobRow.id == AttemptRow.job_id)
    .where(AttemptRow.id.in_(_IDS))
    .order_by(AttemptRow.id)
    .with_for_update(of=JobRow)
)
_STANDINGS = (
    select(
        AttemptRow.id,
        AttemptRow.job_id,
        AttemptRow.epoch,
        AttemptRow.state,
        AttemptRow.workers,
        AttemptRow.token_hash,
        AttemptRow.last_report_at.is_not(None),
        JobRow.desired,
        func.coalesce(JobRow.steps, cast(JobRow.spec[("training", "steps")].as_string(), BigInteger)),
        func.coalesce(ReportStreamRow.last_seq, 0),
    )
    .join(JobRow, JobRow.id == AttemptRow.job_id)
    .outerjoin(ReportStreamRow, (ReportStreamRow.attempt_id == AttemptRow.id) & (ReportStreamRow.rank == bindparam("rank")))
    .where(AttemptRow.id.in_(_IDS))
)
_OF_OTHERS = update(_ATTEMPTS).where(_ATTEMPTS.c.id.in_(_IDS)).values(last_report_at=bindparam("now"))
_OF_RANK_0 = _OF_OTHERS.values(lease_expires_at=bindparam("until"))
_ATTEMPT_STEPS = Bulk(
    lambda _: (
        update(_ATTEMPTS)
        .where(_ATTEMPTS.c.id == bindparam("of_attempt"))
        .values({name: bindparam(name) for name in ("last_step", "last_progress_at")})
    )
)
_JOB_STEPS = Bulk(
    lambda _: (
        update(_JOBS)
        .where(_JOBS.c.id == bindparam("of_job"))
        .values({name: bindparam(name) for name in ("step", "loss", "tokens_per_s", "remaining_s", "reported_at")})
    )
)
_SEQUENCES, _CURVES = upsert(_STREAMS), upsert(_METRICS)


def lock_jobs(session: Session, attempt_ids: Sequence[str]) -> None:
    """Lock the jobs of attempts, in the order of the attempts' ids. On SQLite a writer is alone already."""
    if session.get_bind().dialect.name != "sqlite":
        session.connection().execute(_LOCK, {"ids": attempt_ids})


def standings(session: Session, attempt_ids: Sequence[str], rank: int) -> dict[str, Standing]:
    """Find how attempts stand with their rank of this number; by attempt id. Their jobs must be locked."""
    rows = session.connection().execute(_STANDINGS, {"ids": attempt_ids, "rank": rank})
    return {row[0]: Standing(*tuple(row)) for row in rows}


def note_reports(session: Session, attempt_ids: Sequence[str], now: datetime, lease_expires_at: datetime | None) -> None:
    """Note that attempts were heard now, and renew their leases if the moment when they end is given."""
    if lease_expires_at is None:
        session.connection().execute(_OF_OTHERS, {"ids": attempt_ids, "now": now})
    else:
        session.connection().execute(_OF_RANK_0, {"ids": attempt_ids, "now": now, "until": lease_expires_at})


def note_steps(session: Session, attempts: Sequence[dict[str, Any]], jobs: Sequence[dict[str, Any]]) -> None:
    """Write how far attempts and jobs are. Rows have the columns of the statements above."""
    _ATTEMPT_STEPS.execute(session, attempts)
    _JOB_STEPS.execute(session, jobs)


def put_sequences(session: Session, rows: Sequence[dict[str, Any]]) -> None:
    """Write the sequence numbers of the last reports that were applied, one row for each rank."""
    _SEQUENCES.execute(session, rows)


def put_metrics(session: Session, rows: Sequence[dict[str, Any]]) -> None:
    """Add steps to curves. A step that is there already is replaced, together with its evaluation."""
    _CURVES.execute(session, rows)
