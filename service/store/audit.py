"""SQL about the audit. It has statements that add and that read, and none that change or delete."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, func, select
from sqlalchemy.orm import Session

from octet.service.db.bulk import Rows
from octet.service.db.tables import AuditRow, Base
from octet.service.store.ids import new_ids

_ROWS = Rows(Base.metadata.tables[AuditRow.__tablename__])


class Record(NamedTuple):
    """One row without its id and time, in the order of the table."""

    actor: str | None
    tenant: str | None
    method: str
    path: str
    address: str
    request_id: str
    status: int


def add(connection: Connection, records: Sequence[Record], now: datetime) -> None:
    """Add records, in order."""
    newest = connection.execute(select(func.max(AuditRow.id))).scalar_one()
    ids = new_ids("aud", now, len(records), newest)
    _ROWS.execute(connection, [(id_, now, *record) for id_, record in zip(ids, records, strict=True)])


def list_newest(session: Session, tenant: str | None, limit: int, after: str | None) -> list[AuditRow]:
    """List records, newest first, starting after the id `after`. With a tenant, only those of that tenant's keys."""
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
    if tenant is not None:
        query = query.where(AuditRow.tenant == tenant)
    return list(session.scalars(query if after is None else query.where(AuditRow.id < after)))
