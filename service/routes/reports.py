"""The route where ranks report. It is not for people: the token is made at launch and works for one attempt."""

from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends

from api_schemas import ReportBatch, ReportReply
from service.deps import AppContext, AppContextDep, AttemptTokenDep
from service.errors import ServiceError, StaleAttempt, Unauthenticated
from service.http.problems import answers
from service.jobs.reports import Applied
from service.jobs.usual_reports import SentBatch
from service.telemetry.control_plane import Telemetry, TelemetryDep

router = APIRouter(prefix="/internal/v1/attempts", tags=["internal"])


async def _authenticated(attempt_id: str, token: AttemptTokenDep, context: AppContextDep, telemetry: TelemetryDep) -> str:
    """Check the token before anything else of the request. Without it nobody learns which attempts there are."""
    known = context.reports.remembers(attempt_id, token)
    if not known and not await run_sync(context.reports.knows, attempt_id, token, limiter=context.report_threads):
        telemetry.fenced_writes.inc()
        raise Unauthenticated("the token is not this attempt's; end this process")
    return attempt_id


@router.post("/{attempt_id}/reports", operation_id="report", responses=answers(400, 401, 404, 409, 413, 422))
async def report(
    attempt_id: Annotated[str, Depends(_authenticated)],
    batch: ReportBatch,
    token: AttemptTokenDep,
    context: AppContextDep,
    telemetry: TelemetryDep,
) -> ReportReply:
    """Apply one rank's next reports and renew the lease. The answer says what is wanted of the job."""
    return await apply(SentBatch(attempt_id, token, batch), context, telemetry)


async def apply(sent: SentBatch, context: AppContext, telemetry: Telemetry) -> ReportReply:
    """Apply a batch, observe what it did and wake the dispatcher if its attempt is over."""
    try:
        applied = await context.reports.ask(sent)
    except ServiceError as error:
        count_fenced(error, telemetry)
        raise
    observe(applied, context, telemetry)
    return applied.reply


def count_fenced(error: Exception, telemetry: Telemetry) -> None:
    """Count a refusal if its attempt is not, or no longer, the current one."""
    if isinstance(error, StaleAttempt | Unauthenticated):
        telemetry.fenced_writes.inc()


def observe(applied: Applied, context: AppContext, telemetry: Telemetry) -> None:
    """Observe what a batch did, and wake the dispatcher if its attempt is over."""
    telemetry.observe_report(applied.queue_wait_s, applied.phase_s)
    if applied.finished:
        context.wake()
