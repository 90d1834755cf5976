"""Principals: the people and services that send requests, with the tenant and the rights of their keys or tokens."""

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from octet.api_schemas.keys import DEFAULT_TENANT, KeyRole


class Right(Enum):
    """A kind of request."""

    READ = auto()
    CHANGE = auto()
    SCRAPE = auto()
    ADMINISTER = auto()


RIGHTS = {
    KeyRole.VIEWER: frozenset({Right.READ}),
    KeyRole.SUBMITTER: frozenset({Right.READ, Right.CHANGE}),
    KeyRole.ADMIN: frozenset({Right.READ, Right.CHANGE, Right.ADMINISTER}),
    KeyRole.SCRAPER: frozenset({Right.SCRAPE}),
}
SCRAPER_OF_KEY_FILES = "prometheus"
"""The name of keys in the file of keys that read the metrics of all tenants and nothing else."""


@dataclass(frozen=True)
class Principal:
    """Who sends a request.

    `role`: admin for the operator; of a key of the file submitter, or scraper for Prometheus. `sees_all` is true for the
    operator, who acts for every tenant. `key_hash` is set for a key of the database alone, which may be revoked while its
    principal is at work, and `expires_at` for a token alone, in seconds since 1970.
    """

    name: str
    tenant: str
    rights: frozenset[Right]
    role: KeyRole
    sees_all: bool = False
    key_hash: bytes | None = field(default=None, repr=False)
    expires_at: float | None = None

    @property
    def may_end(self) -> bool:
        """True if the principal may stop being one while it is at work."""
        return self.key_hash is not None or self.expires_at is not None

    @property
    def visible_tenant(self) -> str | None:
        """The tenant whose jobs this principal sees; None for all."""
        return None if self.sees_all else self.tenant


def of_key_file(tenant: str) -> Principal:
    """Return the principal of a key that the server was started with. One without a name is the operator's."""
    if tenant == DEFAULT_TENANT:
        return operator("the operator's key")
    role = KeyRole.SCRAPER if tenant == SCRAPER_OF_KEY_FILES else KeyRole.SUBMITTER
    return Principal(f"the key of {tenant}", tenant, RIGHTS[role], role)


def of_role(
    name: str, tenant: str, role: KeyRole, *, key_hash: bytes | None = None, expires_at: float | None = None
) -> Principal:
    """Return the principal of a key of the database, or of a token. An admin of the default tenant is an operator."""
    if (tenant, role) == (DEFAULT_TENANT, KeyRole.ADMIN):
        return replace(operator(name), key_hash=key_hash, expires_at=expires_at)
    return Principal(name, tenant, RIGHTS[role], role, key_hash=key_hash, expires_at=expires_at)


def operator(name: str) -> Principal:
    """Return a principal who may do everything for every tenant."""
    return Principal(name, DEFAULT_TENANT, frozenset(Right), KeyRole.ADMIN, sees_all=True)
