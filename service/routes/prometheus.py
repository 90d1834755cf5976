"""The route that Prometheus asks for the ranks to scrape."""

from fastapi import APIRouter

from octet.service.deps import AppContextDep
from octet.service.http.problems import answers
from octet.service.telemetry.discovery import TargetGroup, rank_targets

router = APIRouter(prefix="/internal/v1/prometheus", tags=["operations"])


@router.get("/targets", operation_id="prometheus_targets", responses=answers(422))
def prometheus_targets(context: AppContextDep) -> list[TargetGroup]:
    """Every rank that serves metrics now."""
    with context.database.read() as session:
        return rank_targets(session)
