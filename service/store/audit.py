"""SQL about the audit. It has statements that add and that read, and none that change or delete."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from octet.service.db.tables import AuditRow
from octet.service.store.ids import new_ids


def add(session: Session, records: Sequence[Mapping[str, Any]], now: datetime) -> None:
    """Add records, in order. Each has every column but `id` and `at`."""
    newest = session.scalar(select(func.max(AuditRow.id)))
    ids = new_ids("aud", now, len(records), newest)
    session.execute(insert(AuditRow), [{"id": id_, "at": now, **record} for id_, record in zip(ids, records, strict=True)])


def list_newest(session: Session, tenant: str | None, limit: int, after: str | None) -> list[AuditRow]:
    """List records, newest first, starting after the id `after`. With a tenant, only those of that tenant's keys."""
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
    if tenant is not None:
        query = query.where(AuditRow.tenant == tenant)
    return list(session.scalars(query if after is None else query.where(AuditRow.id < after)))
