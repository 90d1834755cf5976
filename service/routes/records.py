"""The records of a job: events, log lines, metrics, checkpoints, attempts.

Events and log lines are also streams, for requests with `Accept: text/event-stream`.
"""

from datetime import UTC, datetime
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import AfterValidator, AwareDatetime
from sqlalchemy.orm import Session

from octet.api_schemas import Attempt, Checkpoint, Contract, Event, LogLine, MetricPoint, Page, Violation
from octet.api_schemas.measured import Measurements
from octet.service import store
from octet.service.deps import AppContextDep, JobIdDep, VisibleTenantDep, context_of, principal_of
from octet.service.errors import InvalidRequest, NotFound
from octet.service.http.pages import AfterQuery, LimitQuery, page_as_json, page_of
from octet.service.http.problems import Answers, answers
from octet.service.http.streams import EVENT_STREAM, Source, Streams, read_part
from octet.service.jobs import views
from octet.service.routes.job_views import existing_job
from octet.service.store.ids import is_id
from octet.service.store.records import LogFilter

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["records"])

_MOST_CHARACTERS = 1 << 20
"""The most of a page of events or log lines. It has fewer items then than were asked for, and `has_more` is true."""

Item = TypeVar("Item", bound=Contract)
LastEventIdHeader = Annotated[str | None, Header(alias="Last-Event-ID", pattern="^[0-9]{1,16}$")]
_STREAM: Answers = {200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}}}


def _read_events(session: Session, job_id: str, after: int, limit: int) -> list[Event]:
    return [views.record(Event, row) for row in store.jobs.events_after(session, job_id, after, limit)]


def _logs(wanted: LogFilter) -> Source[LogLine]:
    def read(session: Session, job_id: str, after: int, limit: int) -> list[LogLine]:
        return [views.record(LogLine, row) for row in store.records.log_lines_after(session, job_id, after, limit, wanted)]

    return Source("log_line", read, lambda line: line.seq, lambda head: head.last_log_seq)


EVENTS = Source("event", _read_events, lambda event: event.seq, lambda head: head.last_event_seq)
LOGS = _logs(store.records.EVERY_LINE)


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("allowed: a time that lies between the years 1 and 9999 in UTC, too") from None


def _wanted_lines(
    rank: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="only lines of this rank")] = None,
    attempt_id: Annotated[str | None, Query(max_length=31, description="only lines of this attempt")] = None,
    since: Annotated[
        Annotated[AwareDatetime, AfterValidator(_in_utc)] | None, Query(description="only lines logged then or later")
    ] = None,
) -> LogFilter:
    return LogFilter(rank, attempt_id, since)


LogFilterDep = Annotated[LogFilter, Depends(_wanted_lines)]


@router.get("/events", operation_id="list_events", response_model=Page[Event], responses=answers(404, 422) | _STREAM)
def events(
    request: Request,
    job_id: JobIdDep,
    limit: LimitQuery = 100,
    after: AfterQuery = 0,
    last_event_id: LastEventIdHeader = None,
) -> Response:
    """Events of the job, in order. A stream of them goes on until the job is over."""
    return _page_or_stream(request, job_id, EVENTS, limit, int(last_event_id or after))


@router.get("/logs", operation_id="list_logs", response_model=Page[LogLine], responses=answers(404, 422) | _STREAM)
def logs(
    request: Request,
    job_id: JobIdDep,
    wanted: LogFilterDep,
    limit: LimitQuery = 100,
    after: AfterQuery = 0,
    last_event_id: LastEventIdHeader = None,
    tail: Annotated[
        int | None, Query(ge=1, le=100_000, description="begin with so many of the last lines, where `after` is 0")
    ] = None,
) -> Response:
    """Log lines of all ranks and attempts, in order. A stream of them goes on until the job is over.

    A stream has all lines from a place on: read a page of those that are wanted, and follow from its `last_id`.
    """
    if _is_stream(request) and (wanted, tail) != (store.records.EVERY_LINE, None):
        message = "Read a page with them, and open a stream with its last_id as Last-Event-ID."
        given = ", ".join(name for name in ("rank", "attempt_id", "since", "tail") if name in request.query_params)
        raise InvalidRequest.of((Violation(field="accept", got=f"a stream with {given}", allowed="a page", message=message),))
    if tail is not None and not after:
        with context_of(request).database.read() as session:
            after = store.records.before_last_log_lines(session, job_id, tail, wanted)
    return _page_or_stream(request, job_id, _logs(wanted), limit, int(last_event_id or after))


@router.get("/metrics", operation_id="list_metrics", responses=answers(404, 422))
def metrics(
    job_id: JobIdDep, context: AppContextDep, tenant: VisibleTenantDep, limit: LimitQuery = 1000, after: AfterQuery = 0
) -> Page[MetricPoint]:
    """The job's curve. Every step is in it once, from the last attempt that trained it."""
    with context.database.read() as session:
        existing_job(session, job_id, tenant)
        points = [views.metric_point(row) for row in store.curves.points_after(session, job_id, after, limit + 1)]
    return page_of(points, limit, lambda point: str(point.step))


@router.get("/measurements", operation_id="get_measurements", responses=answers(404, 422))
def measurements(job_id: JobIdDep, context: AppContextDep, tenant: VisibleTenantDep) -> Measurements:
    """Parameters, converted layers, memory by class beside that of fp32, and the layers that FP8 holds worst.

    404 before the start. They are those of rank 0, as it last reported them: memory after the first step,
    layers whenever a step was sampled.
    """
    with context.database.read() as session:
        existing_job(session, job_id, tenant)
        row = store.records.find_measurements(session, job_id)
        if row is None:
            raise NotFound(f"job {job_id} has not started; it is measured from then on")
        return Measurements.read_stored({name: getattr(row, name) for name in Measurements.model_fields if name != "object"})


@router.get("/checkpoints", operation_id="list_checkpoints", responses=answers(404, 422))
def checkpoints(
    job_id: JobIdDep,
    context: AppContextDep,
    tenant: VisibleTenantDep,
    limit: LimitQuery = 100,
    after: Annotated[str | None, Query(max_length=31)] = None,
) -> Page[Checkpoint]:
    """Complete checkpoints, in the order of their steps."""
    with context.database.read() as session:
        existing_job(session, job_id, tenant)
        after_step = 0
        if after is not None:
            found = store.records.checkpoint_step(session, job_id, after) if is_id("ckpt", after) else None
            if found is None:
                raise _no_such_item(after, "checkpoint")
            after_step = found
        rows = store.records.checkpoints_after(session, job_id, after_step, limit + 1)
        return page_of([views.record(Checkpoint, row) for row in rows], limit, lambda checkpoint: checkpoint.id)


@router.get("/attempts", operation_id="list_attempts", responses=answers(404, 422))
def attempts(
    job_id: JobIdDep,
    context: AppContextDep,
    tenant: VisibleTenantDep,
    limit: LimitQuery = 100,
    after: Annotated[str | None, Query(max_length=31)] = None,
) -> Page[Attempt]:
    """The job's placements on the cluster, first to last."""
    with context.database.read() as session:
        existing_job(session, job_id, tenant)
        shown = [views.record(Attempt, row) for row in store.jobs.attempts_of(session, job_id)]
    if after is not None:
        ids = [attempt.id for attempt in shown]
        if after not in ids:
            raise _no_such_item(after, "attempt")
        shown = shown[ids.index(after) + 1 :]
    return page_of(shown[: limit + 1], limit, lambda attempt: attempt.id)


def _page_or_stream(request: Request, job_id: str, source: Source[Item], limit: int, after: int) -> Response:
    with context_of(request).database.read() as session:
        existing_job(session, job_id, principal_of(request).visible_tenant)
        if _is_stream(request):
            streams: Streams = request.app.state.streams
            return streams.open(job_id, source, after)
        part, is_cut = read_part(session, job_id, source, after, limit + 1, _MOST_CHARACTERS)
    shown = part[:limit]
    return page_as_json([text for _, text in shown], [str(key) for key, _ in shown], has_more=is_cut or len(part) > limit)


def _is_stream(request: Request) -> bool:
    return EVENT_STREAM in request.headers.get("accept", "")


def _no_such_item(after: str, kind: str) -> InvalidRequest:
    message = "Use last_id of the page before."
    return InvalidRequest.of((Violation(field="after", got=after, allowed=f"the id of a {kind} of this job", message=message),))
