"""Routes for the operator: is the service alive, can it take jobs, what is wrong with it, and its metrics."""

from fastapi import APIRouter, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from octet.api_schemas import Alert, Loop, Page
from octet.api_schemas.quotas import TenantUse
from octet.service import store
from octet.service.deps import AppContextDep, VisibleTenantDep
from octet.service.errors import NotReady
from octet.service.http.pages import LimitQuery, page_of
from octet.service.http.problems import answers
from octet.service.jobs.alerts import Watch
from octet.service.scheduling.pools import use_of
from octet.service.telemetry.control_plane import TelemetryDep

health = APIRouter(tags=["operations"])
router = APIRouter(tags=["operations"])
metrics = APIRouter(tags=["operations"])
targets = APIRouter(prefix="/internal/v1/prometheus", tags=["operations"])


@health.get("/healthz", operation_id="healthz", responses=answers(422))
async def healthz() -> dict[str, str]:
    """200 while the process serves requests."""
    # A coroutine needs no thread, so it answers while all threads are busy.
    return {"status": "ok"}


@health.get("/readyz", operation_id="readyz", responses=answers(422, 503))
def readyz(context: AppContextDep) -> dict[str, str]:
    """200 while the database answers, a dispatcher leads and its loops make progress: jobs are accepted and will run."""
    with context.database.read() as session:
        now = context.database.now(session)
        if not store.queue.lease_is_held(session, store.queue.LEADER, now):
            raise NotReady("no dispatcher leads: jobs are accepted, and wait until one does")
        stalled = [name for name, is_stalled in store.queue.loops_stalled(session, now).items() if is_stalled]
    if stalled:
        raise NotReady(
            f"the dispatcher's loop {', '.join(stalled)} makes no progress: jobs are accepted, and may wait. Its log says why."
        )
    return {"status": "ready"}


@router.get("/v1/loops", operation_id="list_loops", responses=answers(422))
def loops(context: AppContextDep) -> Page[Loop]:
    """The loops of the dispatcher that leads, and whether each makes progress; none while no dispatcher leads."""
    with context.database.read() as session:
        stalled = store.queue.loops_stalled(session, context.database.now(session))
    shown = [Loop(name=name, is_stalled=is_stalled) for name, is_stalled in stalled.items()]
    return page_of(shown, len(shown), lambda loop: loop.name)


@router.get("/v1/usage", operation_id="list_usage", responses=answers(422))
def usage(context: AppContextDep, tenant: VisibleTenantDep) -> Page[TenantUse]:
    """The use that the key's tenant makes of its quotas: slots and jobs now, slot hours of this month (UTC), storage.

    The operator sees all tenants that have jobs.
    """
    with context.database.read() as session:
        tenants = store.use.tenants(session) if tenant is None else [tenant]
        shown = use_of(session, context.settings, tenants, context.database.now(session))
    return page_of(shown, len(shown), lambda each: each.tenant)


@router.get("/v1/alerts", operation_id="list_alerts", responses=answers(422))
def alerts(context: AppContextDep, tenant: VisibleTenantDep, limit: LimitQuery = 100) -> Page[Alert]:
    """The alerts that fire now, critical ones first: six of the rules for Prometheus, computed from the database.

    Alerts about jobs are those of the key's tenant; alerts about the leader, its loops and leases are for everyone.
    """
    settings = context.settings
    with context.database.read() as session:
        pools = [pool.name for pool in settings.pools]
        now = context.database.now(session)
        found = Watch(session, now, tenant, pools, limit + 1, settings.runbooks_url).alerts()
    return page_of(found, limit, lambda alert: alert.name)


@metrics.get(
    "/metrics",
    operation_id="prometheus_metrics",
    response_class=Response,
    responses={**answers(422), 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def prometheus_metrics(telemetry: TelemetryDep) -> Response:
    """Metrics of the control plane, in Prometheus text format."""
    return Response(telemetry.render(), media_type=CONTENT_TYPE_LATEST)


# Ranks are shown to Prometheus by HTTP service discovery (`http_sd_configs`). Only ranks of live attempts are listed, so the
# series of an ended job go away with its target.


class TargetGroup(BaseModel):
    """One target and its labels, in the words of Prometheus. `job` is the id of the job, not the name of a scrape."""

    targets: list[str]
    labels: dict[str, str]


@targets.get("/targets", operation_id="prometheus_targets", responses=answers(422))
def prometheus_targets(context: AppContextDep) -> list[TargetGroup]:
    """Every rank that serves metrics now, on a node of the cluster: Prometheus is sent nowhere else by what a rank says."""
    with context.database.read() as session:
        nodes = {node for pool in store.queue.capacities(session) for node in pool.nodes}
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
            if exporter.address.rpartition(":")[0].strip("[]") in nodes
        ]
