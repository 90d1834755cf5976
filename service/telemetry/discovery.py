"""Show the ranks to Prometheus: HTTP service discovery (`http_sd_configs`).

Only ranks of live attempts are listed, so the series of an ended job go away with its target.
"""

from pydantic import BaseModel
from sqlalchemy.orm import Session

from octet.service import store


class TargetGroup(BaseModel):
    """One target and its labels, in the words of Prometheus. `job` is the id of the job, not the name of a scrape."""

    targets: list[str]
    labels: dict[str, str]


def rank_targets(session: Session) -> list[TargetGroup]:
    """List every rank that serves metrics now."""
    return [
        TargetGroup(
            targets=[exporter.address],
            labels={
                "job": attempt.job_id,
                "attempt": attempt.id,
                "rank": str(exporter.rank),
                "pool": attempt.pool,
                "tenant": job.tenant,
                "level": job.spec["precision"]["level"],
            },
        )
        for exporter, attempt, job in store.records.live_exporters(session)
    ]
