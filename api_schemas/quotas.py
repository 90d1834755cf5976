"""Quotas that an operator states for all pools: how high roles may set priorities, and the storage of tenants.

A tenant's slots, running jobs and slot hours are limits of a pool (`TenantConfig`).
"""

from typing import Annotated, Literal

from pydantic import Field

from octet.api_schemas.base import Contract, Timestamp
from octet.api_schemas.keys import KeyRole
from octet.api_schemas.resources import TenantName

HIGHEST_PRIORITY = 100
NORMAL_PRIORITY = 50
"""The priority of a job that names none."""

Priority = Annotated[int, Field(ge=0, le=HIGHEST_PRIORITY)]
SubmittingRole = Literal["submitter", "admin"]


class TenantQuota(Contract):
    """The storage of a tenant: what checkpoints and exports of all its jobs take together."""

    storage_bytes: int = Field(ge=0, description="once they take as much, the tenant's jobs wait until there is less")
    retention_days: float | None = Field(
        default=None,
        ge=0,
        le=36_525,
        description="while the storage is full, what jobs saved that are over for so long is deleted, the oldest first; null: "
        "nothing is",
    )


class Quotas(Contract):
    """The quotas file. The operator, and the user of a server without keys, has none of them for priorities."""

    priorities: dict[SubmittingRole, Priority] = Field(
        default_factory=dict,
        description="the highest priority that a role may ask for; by default 50 for a submitter and 100 for an admin",
    )

    tenants: dict[TenantName, TenantQuota] = Field(default_factory=dict, description="storage by tenant; others have no limit")

    def most_priority(self, role: KeyRole) -> int:
        """Return the highest priority that jobs of a role may have."""
        if role is KeyRole.ADMIN:
            return self.priorities.get("admin", HIGHEST_PRIORITY)
        return self.priorities.get("submitter", NORMAL_PRIORITY)


class PoolUse(Contract):
    """The part of a pool that a tenant takes, beside what it may: null where it has no limit."""

    pool: str
    slots: int = Field(description="that its attempts hold now")
    most_slots: int | None
    jobs: int = Field(description="that run now")
    most_jobs: int | None
    slot_hours: float = Field(description="that its attempts have taken this month, those of deleted jobs too")
    most_slot_hours: float | None


class TenantUse(Contract):
    """The use that a tenant makes of pools and of storage, beside its quotas."""

    object: Literal["tenant_use"] = "tenant_use"
    tenant: str
    month_ends_at: Timestamp = Field(description="when slot hours begin at 0 again")
    storage_bytes: int = Field(description="of the checkpoints and exports of its jobs")
    most_storage_bytes: int | None
    pools: tuple[PoolUse, ...]
