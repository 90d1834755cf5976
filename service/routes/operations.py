"""Routes for the operator: is the service alive, can it take jobs, and its metrics."""

from fastapi import APIRouter, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from octet.api_schemas import Loop, Page
from octet.service import store
from octet.service.deps import AppContextDep
from octet.service.errors import NotReady
from octet.service.http.pages import page_of
from octet.service.http.problems import answers
from octet.service.telemetry.control_plane import TelemetryDep

health = APIRouter(tags=["operations"])
router = APIRouter(tags=["operations"])
metrics = APIRouter(tags=["operations"])


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


@metrics.get(
    "/metrics",
    operation_id="prometheus_metrics",
    response_class=Response,
    responses={**answers(422), 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def prometheus_metrics(telemetry: TelemetryDep) -> Response:
    """Metrics of the control plane, in Prometheus text format."""
    return Response(telemetry.render(), media_type=CONTENT_TYPE_LATEST)
