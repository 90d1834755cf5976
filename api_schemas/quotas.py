"""Quotas that an operator states for all pools: how high roles may set priorities, and the storage of tenants.

A tenant's slots, running jobs and slot hours are limits of a pool (`TenantConfig`).
"""

from typing import Annotated, Literal

from pydantic import Field

from octet.api_schemas.base import Contract
from octet.api_schemas.keys import KeyRole

HIGHEST_PRIORITY = 100
NORMAL_PRIORITY = 50
"""The priority of a job that names none."""

Priority = Annotated[int, Field(ge=0, le=HIGHEST_PRIORITY)]
SubmittingRole = Literal["submitter", "admin"]


class Quotas(Contract):
    """The quotas file. The operator, and the user of a server without keys, has none of them for priorities."""

    priorities: dict[SubmittingRole, Priority] = Field(
        default_factory=dict,
        description="the highest priority that a role may ask for; by default 50 for a submitter and 100 for an admin",
    )

    def most_priority(self, role: KeyRole) -> int:
        """Return the highest priority that jobs of a role may have."""
        if role is KeyRole.ADMIN:
            return self.priorities.get("admin", HIGHEST_PRIORITY)
        return self.priorities.get("submitter", NORMAL_PRIORITY)
