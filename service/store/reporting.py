"""SQL of the reports that come most often: heartbeats and steps. Each statement is about many attempts at once.

The rows stay outside the session, so these functions come before anything else of a transaction that reads the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, BindParameter, DateTime, Select, Update, bindparam, cast, func, select, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from api_schemas import AttemptState, DesiredState
from service.db.bulk import Changes, ForIds, Rows, RowTransaction, runner_of, write_together
from service.db.tables import AttemptRow, Base, CurvePartRow, JobRow, ReportStreamRow
from service.store.curves import ADDED_PARTS, Part

_ATTEMPTS, _JOBS = Base.metadata.tables[AttemptRow.__tablename__], Base.metadata.tables[JobRow.__tablename__]
_STREAMS = Base.metadata.tables[ReportStreamRow.__tablename__]


class Standing(NamedTuple):
    """How an attempt stands with one of its ranks, as far as it decides about reports. last_step: of the job's curve."""

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
    told: datetime | None
    """What PostgreSQL's clock said."""


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


def _lock(ids: Sequence[BindParameter[str]]) -> Select[*tuple[Any, ...]]:
    query = select(AttemptRow.id).join(JobRow, JobRow.id == AttemptRow.job_id).where(AttemptRow.id.in_(ids))
    return query.order_by(AttemptRow.id).with_for_update(of=JobRow)


def _standings(ids: Sequence[BindParameter[str]]) -> Select[*tuple[Any, ...]]:
    is_rank = ReportStreamRow.rank == bindparam("rank")
    is_of_job = CurvePartRow.job_id == AttemptRow.job_id
    end_of_curve = select(func.max(CurvePartRow.last_step)).where(is_of_job).correlate(AttemptRow).scalar_subquery()
    return (
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
            func.coalesce(end_of_curve, 0),
            _Clock(),
        )
        .join(JobRow, JobRow.id == AttemptRow.job_id)
        .outerjoin(ReportStreamRow, (ReportStreamRow.attempt_id == AttemptRow.id) & is_rank)
        .where(AttemptRow.id.in_(ids))
    )


def _heard(ids: Sequence[BindParameter[str]]) -> Update:
    return update(_ATTEMPTS).where(_ATTEMPTS.c.id.in_(ids)).values(last_report_at=bindparam("now"))


def _renewed(ids: Sequence[BindParameter[str]]) -> Update:
    return _heard(ids).values(lease_expires_at=bindparam("until"))


_LOCK, _STANDINGS, _OF_OTHERS, _OF_RANK_0 = ForIds(_lock), ForIds(_standings), ForIds(_heard), ForIds(_renewed)
_ATTEMPT_STEPS = Changes(_ATTEMPTS, "id", ["last_step", "last_progress_at", "last_report_at", "lease_expires_at"])
_JOB_STEPS = Changes(_JOBS, "id", ["step", "loss", "tokens_per_s", "remaining_s", "reported_at"])
_SEQUENCES = Rows(_STREAMS, replaces=True)


@dataclass(frozen=True)
class Steps:
    """Rows of batches of steps, at most one batch of an attempt. Attempts and jobs have an id, and then the columns of the
    statements above; sequences and parts have the columns of their tables, in their order.
    """

    attempts: list[tuple[Any, ...]] = field(default_factory=list)
    jobs: list[tuple[Any, ...]] = field(default_factory=list)
    sequences: list[tuple[str, int, int]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


_STATES, _DESIRED = {state.value: state for state in AttemptState}, {desired.value: desired for desired in DesiredState}


def lock_jobs(transaction: RowTransaction, attempt_ids: Sequence[str]) -> None:
    """Lock the jobs of attempts, in the order of the attempts' ids. On SQLite a writer is alone already."""
    if runner_of(transaction).dialect.name != "sqlite":
        _LOCK.execute(transaction, attempt_ids)


def standings(transaction: RowTransaction, attempt_ids: Sequence[str], rank: int) -> dict[str, Standing]:
    """Find how attempts stand with their rank of this number; by attempt id. Their jobs must be locked."""
    found = {}
    for attempt_id, job_id, epoch, state, workers, token_hash, was_heard, desired, *numbers in _STANDINGS.execute(
        transaction, attempt_ids, rank=rank
    ):
        states = _STATES[state], _DESIRED[desired]
        found[attempt_id] = Standing(
            attempt_id, job_id, epoch, states[0], workers, token_hash, bool(was_heard), states[1], *numbers
        )
    return found


def note_heartbeats(
    transaction: RowTransaction, attempt_ids: Sequence[str], now: datetime, lease_expires_at: datetime | None
) -> None:
    """Note that attempts were heard now, and renew their leases if the moment when they end is given. At least one attempt."""
    if lease_expires_at is None:
        _OF_OTHERS.execute(transaction, attempt_ids, now=now)
    else:
        _OF_RANK_0.execute(transaction, attempt_ids, now=now, until=lease_expires_at)


def note_steps(transaction: RowTransaction, steps: Steps) -> None:
    """Write what batches of steps say: on PostgreSQL with one statement."""
    write_together(
        transaction,
        [
            (_ATTEMPT_STEPS, steps.attempts),
            (_JOB_STEPS, steps.jobs),
            (_SEQUENCES, steps.sequences),
            (ADDED_PARTS, steps.parts),
        ],
    )
