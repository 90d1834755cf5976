"""Contracts of API keys and of the audit: who may do what in which tenant, and who did what."""

from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import Field

from octet.api_schemas.base import Contract, Timestamp

TENANT = r"[a-z0-9][a-z0-9-]{0,31}"
"""The name of a tenant: the project that owns jobs, comparisons and keys."""
DEFAULT_TENANT = "default"
SECRET_PREFIX = "octet_"
"""The first characters of every key that a server makes."""


def local_key_file(port: int) -> Path:
    """Return the user's own file for the key of `octet serve` at a port of loopback.

    It is there where the system does not say whose connections come, as on macOS. Clients of the same user read it.
    """
    return Path.home() / ".config" / "octet" / f"local-key-{port}"


_YEAR_S = 366 * 86_400
_MONTH_S = 31 * 86_400


class KeyRole(StrEnum):
    """The role of a key in its tenant."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    ADMIN = "admin"
    SCRAPER = "scraper"


class KeySpec(Contract):
    """A key to make, for one person or one service."""

    name: str = Field(
        min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$", description="the person or the service that uses it"
    )
    role: KeyRole = Field(
        description="viewer reads; submitter also submits and changes; admin also manages the tenant's keys and reads its "
        "audit; scraper reads metrics and nothing else"
    )
    tenant: str | None = Field(
        default=None, pattern=f"^{TENANT}$", description="by default the caller's; another one is for the operator"
    )
    expires_in_s: int | None = Field(default=None, ge=1, le=10 * _YEAR_S, description="null: it does not expire")


class KeyRotation(Contract):
    """A new key in the place of an old one, and for how long both work."""

    overlap_s: int = Field(default=86_400, ge=0, le=_MONTH_S, description="for so long the old key still works")
    expires_in_s: int | None = Field(
        default=None, ge=1, le=10 * _YEAR_S, description="of the new key; by default as long as the old one was made for"
    )


class ApiKey(Contract):
    """A key without its secret, which nobody but its user has."""

    object: Literal["api_key"] = "api_key"
    id: str
    name: str
    tenant: str
    role: KeyRole
    created_at: Timestamp
    created_by: str
    expires_at: Timestamp | None
    revoked_at: Timestamp | None
    used_at: Timestamp | None = Field(description="last use, to the minute")
    replaced_by: str | None = Field(description="the key that a rotation has made in its place")


class NewApiKey(ApiKey):
    """A key that was just made. No later answer has its secret."""

    secret: str = Field(description="send it as 'Authorization: Bearer <secret>'")


class SignIn(Contract):
    """The identity provider at which people sign in to a server."""

    object: Literal["sign_in"] = "sign_in"
    issuer: str = Field(description="its OpenID Connect discovery document is below this URL")
    client_id: str = Field(description="of the public client that `octet login` is there")
    audience: str = Field(description="the audience that a token has to be for")
    scopes: tuple[str, ...]


class AuditRecord(Contract):
    """One request that was to change something, or that was refused for its key."""

    object: Literal["audit_record"] = "audit_record"
    id: str
    at: Timestamp
    actor: str | None = Field(description="the caller, by the name and id of its key; null if its key is not known")
    tenant: str | None
    method: str
    path: str
    address: str = Field(description="the other end of the connection; that of a proxy if there is one")
    request_id: str = Field(description="the X-Request-ID of the answer: the request's own, or one of the server's")
    status: int
