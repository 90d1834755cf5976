"""API keys in the database: make, rotate, revoke. A secret has 256 random bits; the database has its SHA-256 alone."""

import secrets
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from octet.api_schemas import Violation
from octet.api_schemas.keys import SECRET_PREFIX, ApiKey, KeyRole, KeyRotation, KeySpec, NewApiKey
from octet.service import store
from octet.service.access.authentication import hash_of
from octet.service.access.principal import Principal
from octet.service.db.tables import ApiKeyRow
from octet.service.errors import Forbidden, IllegalTransition, InvalidRequest, NotFound
from octet.service.store.ids import new_id

_SECRET_BYTES = 32


def create(session: Session, wanted: KeySpec, by: Principal, now: datetime) -> NewApiKey:
    """Make a key. Raises InvalidRequest for another tenant than the caller's, unless the caller is the operator; Forbidden for
    a key that would read what the caller may not.
    """
    tenant = wanted.tenant or by.tenant
    if by.visible_tenant not in (None, tenant):
        message = "Leave it out, or ask the operator for a key of that tenant."
        raise InvalidRequest.of((Violation(field="tenant", got=tenant, allowed=by.tenant, message=message),))
    _require_scope(wanted.role, by)
    lifetime = None if wanted.expires_in_s is None else timedelta(seconds=wanted.expires_in_s)
    row = ApiKeyRow(name=wanted.name, tenant=tenant, role=wanted.role)
    return _stored(session, row, lifetime, by, now)


def rotate(session: Session, key_id: str, wanted: KeyRotation, by: Principal, now: datetime) -> NewApiKey:
    """Make a key with the name, tenant and role of another one, which works for the overlap and then no more.

    Raises NotFound, also for another tenant's key, IllegalTransition for one that was revoked, has expired or was rotated, and
    Forbidden as `create` does.
    """
    old = _find(session, key_id, by)
    _require_scope(old.role, by)
    if old.replaced_by is not None:
        raise IllegalTransition(f"{old.replaced_by} was made in the place of the key {key_id}; rotate that one")
    if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= now):
        raise IllegalTransition(f"the key {key_id} works no more; make another one")
    if wanted.expires_in_s is not None:
        lifetime: timedelta | None = timedelta(seconds=wanted.expires_in_s)
    else:
        lifetime = None if old.expires_at is None else old.expires_at - old.created_at
    end = now + timedelta(seconds=wanted.overlap_s)
    old.expires_at = end if old.expires_at is None else min(end, old.expires_at)
    made = _stored(session, ApiKeyRow(name=old.name, tenant=old.tenant, role=old.role), lifetime, by, now)
    old.replaced_by = made.id
    return made


def revoke(session: Session, key_id: str, by: Principal, now: datetime) -> ApiKey:
    """Refuse a key from now on. A second call changes nothing. Raises NotFound, also for another tenant's key."""
    row = _find(session, key_id, by)
    row.revoked_at = row.revoked_at or now
    return shown(row)


def _require_scope(role: KeyRole, by: Principal) -> None:
    """Metrics are of all tenants, so an admin of one would see the others' jobs by a key of its own making."""
    if role is KeyRole.SCRAPER and not by.sees_all:
        raise Forbidden("a scraper reads the metrics of all tenants; ask the operator for its key")


def shown(row: ApiKeyRow) -> ApiKey:
    return ApiKey(**{name: getattr(row, name) for name in ApiKey.model_fields if name != "object"})


def _stored(session: Session, row: ApiKeyRow, lifetime: timedelta | None, by: Principal, now: datetime) -> NewApiKey:
    secret = SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    row.id, row.secret_hash = new_id("key", now), hash_of(secret)
    row.created_at, row.created_by = now, by.name
    row.expires_at = None if lifetime is None else now + lifetime
    session.add(row)
    return NewApiKey(**shown(row).model_dump(), secret=secret)


def _find(session: Session, key_id: str, by: Principal) -> ApiKeyRow:
    row = store.keys.lock(session, key_id, by.visible_tenant)
    if row is None:
        raise NotFound(f"there is no key {key_id}")
    return row
