"""Alerts that the service computes from its database, for whoever has no Prometheus at hand (`GET /v1/alerts`)."""

from typing import Literal

from pydantic import Field

from octet.api_schemas.base import Contract, Timestamp

AlertName = Literal[
    "OctetNoLeader",
    "OctetLoopStalled",
    "OctetLeaseStorm",
    "OctetJobStuckInQueue",
    "OctetJobNoHeartbeat",
    "OctetCheckpointTooOld",
]
Severity = Literal["critical", "warning"]


class Alert(Contract):
    """A rule of `deploy/prometheus/rules/octet.yml` that fires now. `job_id`, `pool` or `loop` is what it fires for."""

    object: Literal["alert"] = "alert"
    name: AlertName
    severity: Severity
    since: Timestamp | None = Field(
        description="when it began: the job was queued, the last report, checkpoint or renewal came; null if nothing says so"
    )
    job_id: str | None = None
    job_name: str | None = None
    pool: str | None = None
    loop: str | None = None
    summary: str
    runbook: str = Field(description="what to do: a link where the operator has set one, or else the place in the repository")
