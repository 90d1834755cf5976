"""SQL of what every batch of reports needs. Each statement is about many attempts at once.

The rows stay outside the session: a session that has read them before does not see the change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, BindParameter, DateTime, bindparam, cast, func, select, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from octet.api_schemas import AttemptState, DesiredState
from octet.service.db.bulk import Changes, Rows, Transaction, connection_of, write_together
from octet.service.db.tables import AttemptRow, Base, CurvePartRow, JobRow, ReportStreamRow
from octet.service.store.curves import ADDED_PARTS, Part

_ATTEMPTS, _JOBS = Base.metadata.tables[AttemptRow.__tablename__], Base.metadata.tables[JobRow.__tablename__]
_STREAMS = Base.metadata.tables[ReportStreamRow.__tablename__]


class AttemptStatus(NamedTuple):
    """The state of an attempt and of the stream of one of its ranks, as far as it decides about reports.

    num_steps: the job's last step, where it is known. last_seq: of the rank's last report that was
    applied. last_step: of the job's curve. read_at: PostgreSQL's clock; None on SQLite.
    """

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
    last_step: int
    read_at: datetime | None


class _Clock(FunctionElement[datetime]):
    """The time of PostgreSQL, and NULL on SQLite: `Database.now` knows it there."""

    type = DateTime(timezone=True)
    inherit_cache = True


@compiles(_Clock)
def _clock(_element: _Clock, _compiler: Any, **_: Any) -> str:
    return "clock_timestamp()"


@compiles(_Clock, "sqlite")
def _no_clock(_element: _Clock, _compiler: Any, **_: Any) -> str:
    return "NULL"


_IDS: BindParameter[Sequence[str]] = bindparam("ids", expanding=True)
_LOCK = (
    select(AttemptRow.id)
    .join(JobRow, JobRow.id == AttemptRow.job_id)
    .where(AttemptRow.id.in_(_IDS))
    .order_by(JobRow.id)
    .with_for_update(of=JobRow)
)
_END_OF_CURVE = select(func.max(CurvePartRow.last_step)).where(CurvePartRow.job_id == AttemptRow.job_id).correlate(AttemptRow)
_STATUSES = (
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
        func.coalesce(_END_OF_CURVE.scalar_subquery(), 0),
        _Clock(),
    )
    .join(JobRow, JobRow.id == AttemptRow.job_id)
    .outerjoin(ReportStreamRow, (ReportStreamRow.attempt_id == AttemptRow.id) & (ReportStreamRow.rank == bindparam("rank")))
    .where(AttemptRow.id.in_(_IDS))
)
_HEARD = update(_ATTEMPTS).where(_ATTEMPTS.c.id.in_(_IDS)).values(last_report_at=bindparam("now"))
_RENEWED = _HEARD.values(lease_expires_at=bindparam("until"))
_ATTEMPT_STEPS = Changes(_ATTEMPTS, "id", ["last_step", "last_progress_at", "last_report_at", "lease_expires_at"])
_JOB_STEPS = Changes(_JOBS, "id", ["step", "loss", "tokens_per_s", "remaining_s", "reported_at"])
_SEQUENCES = Rows(_STREAMS, replaces=True)


@dataclass(frozen=True)
class ReportRows:
    """Rows that batches change, at most one batch of an attempt.

    Attempts and jobs, of batches with steps, have an id and then the columns of the statements
    above; sequences and parts have the columns of their tables, in their order.
    """

    attempts: list[tuple[Any, ...]] = field(default_factory=list)
    jobs: list[tuple[Any, ...]] = field(default_factory=list)
    sequences: list[tuple[str, int, int]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def lock_jobs(transaction: Transaction, attempt_ids: Sequence[str]) -> None:
    """Lock the jobs of attempts, in the order of their own ids. On SQLite a writer is alone already."""
    connection = connection_of(transaction)
    if connection.dialect.name != "sqlite":
        connection.execute(_LOCK, {"ids": attempt_ids})


def statuses(transaction: Transaction, attempt_ids: Sequence[str], rank: int) -> dict[str, AttemptStatus]:
    """Read the statuses of attempts, and of their rank of this number, by attempt. Their jobs must be locked."""
    rows = connection_of(transaction).execute(_STATUSES, {"ids": attempt_ids, "rank": rank})
    return {row[0]: AttemptStatus._make(row) for row in rows}


def hear(transaction: Transaction, attempt_ids: Sequence[str], now: datetime) -> None:
    """Write when attempts were heard, without a change of their leases."""
    if attempt_ids:
        connection_of(transaction).execute(_HEARD, {"ids": attempt_ids, "now": now})


def renew_leases(transaction: Transaction, attempt_ids: Sequence[str], now: datetime, until: datetime) -> None:
    """Write when attempts were heard, and the end of their leases."""
    if attempt_ids:
        connection_of(transaction).execute(_RENEWED, {"ids": attempt_ids, "now": now, "until": until})


def write(transaction: Transaction, rows: ReportRows) -> None:
    """Write the rows of batches: on PostgreSQL with one statement."""
    write_together(
        transaction,
        [
            (_ATTEMPT_STEPS, rows.attempts),
            (_JOB_STEPS, rows.jobs),
            (_SEQUENCES, rows.sequences),
            (ADDED_PARTS, rows.parts),
        ],
    )
