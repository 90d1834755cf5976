"""Show the ranks to Prometheus: HTTP service discovery (`http_sd_configs`).

Only ranks of live attempts are listed, so the series of an ended job go away with its target.
"""

from fastapi import APIRouter
from pydantic import BaseModel

from octet.service import store
from octet.service.deps import AppContextDep
from octet.service.http.problems import answers

router = APIRouter(prefix="/internal/v1/prometheus", tags=["operations"])


class TargetGroup(BaseModel):
    """One target and its labels, in the words of Prometheus. `job` is the id of the job, not the name of a scrape."""

    targets: list[str]
    labels: dict[str, str]


@router.get("/targets", operation_id="prometheus_targets", responses=answers(422))
def prometheus_targets(context: AppContextDep) -> list[TargetGroup]:
    """Every rank that serves metrics now."""
    with context.database.read() as session:
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
