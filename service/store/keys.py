"""SQL about API keys."""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from octet.service.db.tables import ApiKeyRow


def find_valid(session: Session, secret_hash: bytes, now: datetime) -> ApiKeyRow | None:
    """Find the key with this hash. A key that was revoked or has expired is not found."""
    is_valid = (ApiKeyRow.revoked_at.is_(None), or_(ApiKeyRow.expires_at.is_(None), ApiKeyRow.expires_at > now))
    return session.scalars(select(ApiKeyRow).where(ApiKeyRow.secret_hash == secret_hash, *is_valid)).one_or_none()


def lock(session: Session, key_id: str, tenant: str | None) -> ApiKeyRow | None:
    """Find a key and lock it. With a tenant, only one of that tenant."""
    query = select(ApiKeyRow).where(ApiKeyRow.id == key_id).with_for_update()
    return session.scalars(query if tenant is None else query.where(ApiKeyRow.tenant == tenant)).one_or_none()


def list_newest(session: Session, tenant: str | None, limit: int, after: str | None) -> list[ApiKeyRow]:
    """List keys, newest first, starting after the id `after`. With a tenant, only those of that tenant."""
    query = select(ApiKeyRow).order_by(ApiKeyRow.id.desc()).limit(limit)
    if tenant is not None:
        query = query.where(ApiKeyRow.tenant == tenant)
    return list(session.scalars(query if after is None else query.where(ApiKeyRow.id < after)))


def note_uses(session: Session, key_ids: Collection[str], now: datetime, not_since: datetime) -> None:
    """Write that keys are used now, but for those whose last use was written after `not_since`."""
    is_due = or_(ApiKeyRow.used_at.is_(None), ApiKeyRow.used_at <= not_since)
    session.execute(update(ApiKeyRow).where(ApiKeyRow.id.in_(key_ids), is_due).values(used_at=now))
