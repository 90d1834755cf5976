"""The route where ranks report. It is not for people: the token is made at launch and works for one attempt."""

from fastapi import APIRouter

from api_schemas import ReportBatch, ReportReply
from service.deps import AppContextDep, AttemptIdDep, AttemptTokenDep
from service.errors import StaleAttempt, Unauthenticated
from service.http.problems import answers
from service.jobs import reports
from service.telemetry.control_plane import TelemetryDep

router = APIRouter(prefix="/internal/v1/attempts", tags=["internal"])


@router.post("/{attempt_id}/reports", operation_id="report", responses=answers(400, 401, 404, 409, 413, 422))
def report(
    attempt_id: AttemptIdDep, batch: ReportBatch, token: AttemptTokenDep, context: AppContextDep, telemetry: TelemetryDep
) -> ReportReply:
    """Apply one rank's next reports and renew the lease. The answer says what is wanted of the job."""
    try:
        with context.database.write() as session:
            now = context.database.now(session)
            applied = reports.apply(session, attempt_id, token, batch, context.settings.lease_s, now)
    except (StaleAttempt, Unauthenticated):
        telemetry.fenced_writes.inc()
        raise
    telemetry.observe_report(applied.queue_wait_s, applied.phase_s)
    if applied.finished:
        context.wake()
    return applied.reply
