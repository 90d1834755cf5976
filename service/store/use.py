"""SQL of what tenants use: hours of slots in a month, and bytes of checkpoints and exports.

Months are those of UTC. An attempt counts from its reservation to its end, or until now, in each month for its part. What a
deleted job has taken counts until its month is over.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import BindParameter, ColumnElement, Select, bindparam, case, delete, extract, func, or_, select
from sqlalchemy.orm import Session

from octet.api_schemas import AttemptState, DesiredState
from octet.service.db.bulk import Transaction, connection_of
from octet.service.db.tables import AttemptRow, CheckpointRow, DeletedUseRow, ExportRow, JobRow, UtcDateTime

_LIVE = [state for state in AttemptState if not state.is_terminal]


def month_of(moment: datetime) -> tuple[datetime, datetime]:
    """Return the begin of a moment's month, and that of the next one."""
    begin = moment.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return begin, (begin + timedelta(days=32)).replace(day=1)


def hours_of_month(transaction: Transaction, pools: Iterable[str], now: datetime) -> dict[str, dict[str, float]]:
    """Add up the slot hours that attempts have taken in this month, by pool and tenant."""
    connection = connection_of(transaction)
    parameters = {"pools": list(pools), "month": month_of(now)[0], "now": now}
    found: dict[str, dict[str, float]] = {}
    for query in _HOURS[connection.dialect.name]:
        for pool, tenant, hours in connection.execute(query, parameters):
            of_pool = found.setdefault(pool, {})
            of_pool[tenant] = of_pool.get(tenant, 0.0) + float(hours)
    return found


def _hours(table: type[AttemptRow | DeletedUseRow], dialect: str) -> ColumnElement[Any]:
    begin = case((table.created_at < _MONTH, _MONTH), else_=table.created_at)
    end = func.coalesce(table.finished_at, _NOW, type_=UtcDateTime())
    if dialect == "sqlite":
        hours: ColumnElement[Any] = (func.julianday(end) - func.julianday(begin)) * 24
    else:
        hours = extract("epoch", end - begin) / 3600
    return func.sum(table.workers * hours)


def _hours_queries(dialect: str) -> tuple[Select[str, str, Any], ...]:
    is_of_month = or_(AttemptRow.finished_at.is_(None), AttemptRow.finished_at > _MONTH)
    of_attempts = (
        select(AttemptRow.pool, JobRow.tenant, _hours(AttemptRow, dialect))
        .join(JobRow, JobRow.id == AttemptRow.job_id)
        .where(AttemptRow.pool.in_(_POOLS), is_of_month)
        .group_by(AttemptRow.pool, JobRow.tenant)
    )
    of_deleted = (
        select(DeletedUseRow.pool, DeletedUseRow.tenant, _hours(DeletedUseRow, dialect))
        .where(DeletedUseRow.pool.in_(_POOLS), DeletedUseRow.finished_at > _MONTH)
        .group_by(DeletedUseRow.pool, DeletedUseRow.tenant)
    )
    return of_attempts, of_deleted


_MONTH, _NOW = bindparam("month", type_=UtcDateTime()), bindparam("now", type_=UtcDateTime())
_POOLS: BindParameter[Sequence[str]] = bindparam("pools", expanding=True)
_HOURS = {dialect: _hours_queries(dialect) for dialect in ("sqlite", "postgresql")}


def tenants(transaction: Transaction) -> list[str]:
    """List the tenants that have jobs."""
    return list(connection_of(transaction).scalars(select(JobRow.tenant).distinct()))


def note_deleted(session: Session, job: JobRow, now: datetime) -> None:
    """Keep what the attempts of a job that is deleted have taken this month."""
    ended = (AttemptRow.job_id == job.id, AttemptRow.finished_at > month_of(now)[0])
    for attempt in session.scalars(select(AttemptRow).where(*ended)):
        assert attempt.finished_at is not None
        row = DeletedUseRow(attempt_id=attempt.id, pool=attempt.pool, tenant=job.tenant, workers=attempt.workers)
        row.created_at, row.finished_at = attempt.created_at, attempt.finished_at
        session.add(row)


def forget_deleted(session: Session, now: datetime) -> None:
    """Forget what deleted jobs have taken in months that are over."""
    session.execute(delete(DeletedUseRow).where(DeletedUseRow.finished_at <= month_of(now)[0]))


def running_attempts(session: Session, pool: str, tenant: str) -> list[str]:
    """List the attempts of a tenant in a pool that nobody has asked to end."""
    query = select(AttemptRow.id).join(JobRow, JobRow.id == AttemptRow.job_id)
    is_running = (AttemptRow.state.in_(_LIVE), JobRow.desired == DesiredState.RUN)
    return list(session.scalars(query.where(AttemptRow.pool == pool, JobRow.tenant == tenant, *is_running)))


def storage_of(transaction: Transaction, tenants: Iterable[str]) -> dict[str, int]:
    """Add up the bytes of the checkpoints and exports of tenants' jobs."""
    found = dict.fromkeys(tenants, 0)
    for query in _STORAGE if found else ():
        for tenant, num_bytes in connection_of(transaction).execute(query, {"tenants": list(found)}):
            found[tenant] += int(num_bytes)
    return found


class Kept(NamedTuple):
    """A checkpoint or an export of a job that is over."""

    table: type[Any]
    job_id: str
    name: str
    num_bytes: int
    ended_at: datetime


def kept_since(session: Session, tenant: str, before: datetime, limit: int) -> list[Kept]:
    """List what a tenant's jobs saved that were over before a time: the job that ended first comes first, then by step."""
    found: list[Kept] = []
    tables: tuple[type[CheckpointRow | ExportRow], ...] = (CheckpointRow, ExportRow)
    for table in tables:
        columns = select(table.job_id, table.name, table.num_bytes, JobRow.finished_at).join(JobRow, JobRow.id == table.job_id)
        of_tenant = columns.where(JobRow.tenant == tenant, JobRow.finished_at < before)
        rows = session.execute(of_tenant.order_by(JobRow.finished_at, table.job_id, table.step).limit(limit))
        found += [
            Kept(table, job_id, name, num_bytes, ended_at) for job_id, name, num_bytes, ended_at in rows if ended_at is not None
        ]
    return sorted(found, key=lambda kept: (kept.ended_at, kept.job_id))[:limit]


def _bytes_by_tenant(table: type[CheckpointRow | ExportRow]) -> Select[str, int]:
    query = select(JobRow.tenant, func.sum(table.num_bytes)).join(JobRow, JobRow.id == table.job_id)
    return query.where(JobRow.tenant.in_(bindparam("tenants", expanding=True))).group_by(JobRow.tenant)


_STORAGE: Sequence[Select[str, int]] = [_bytes_by_tenant(table) for table in (CheckpointRow, ExportRow)]
