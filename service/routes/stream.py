"""One stream of server-sent events for all that a browser shows: lists of jobs, curves, events and log lines."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import Field, ValidationError
from sqlalchemy.orm import Session

from octet.api_schemas import Contract, Violation, explain
from octet.api_schemas.curve import Points
from octet.service import store
from octet.service.deps import AppContext, context_of, principal_of
from octet.service.errors import InvalidRequest, NotFound
from octet.service.http.problems import answers
from octet.service.http.streams import EVENT_STREAM, ListSource, ListState, Source, Streams, Subscription, places_of
from octet.service.jobs.curve import points_of
from octet.service.routes.records import EVENTS, LOGS
from octet.service.routes.rows import JobIdText, RowsQuery, read_rows
from octet.service.store.curves import CurvePlace
from octet.service.store.rows import RowFilter

router = APIRouter(prefix="/v1", tags=["records"])

_STEPS_AT_ONCE = 500
_MOST_PER_SOURCE = 16


def _read_points(session: Session, job_id: str, after: CurvePlace, _limit: int) -> list[Points]:
    found = store.curves.points_behind(session, job_id, after, _STEPS_AT_ONCE)
    return [points_of(job_id, found)] if found is not None else []


def _place_of(points: Points) -> CurvePlace:
    step = points.step[-1] if points.step else points.after
    return CurvePlace(points.epoch, step, points.evaluation_step[-1] if points.evaluation_step else points.evaluated_after)


POINTS = Source("points", _read_points, _place_of, lambda head: head.curve)
_SOURCES: Mapping[str, tuple[Source[Any], int]] = {"points": (POINTS, 3), "events": (EVENTS, 1), "logs": (LOGS, 1)}
"""The sources by their parameters, each with the count of numbers of a place in it."""

_Ids = Annotated[tuple[JobIdText, ...], Field(max_length=_MOST_PER_SOURCE)]


class StreamQuery(Contract):
    """The parts of a stream: jobs whose points, events or log lines it has, and lists of jobs."""

    points: _Ids = Field(default=(), description="jobs whose curves are shown, as `Points`; repeat it for several")
    events: _Ids = Field(default=(), description="jobs whose events are shown")
    logs: _Ids = Field(default=(), description="jobs whose log lines are shown")
    rows: tuple[Annotated[str, Field(max_length=4096)], ...] = Field(
        default=(), max_length=8, description="a list: the query of /v1/rows, such as `state=running&limit=50`"
    )
    after: str | None = Field(
        default=None, max_length=8192, description="a cursor, or several with commas between them; default: from the beginning"
    )


@router.get(
    "/stream",
    operation_id="stream",
    responses=answers(404, 422) | {200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}}},
)
def stream(
    request: Request,
    query: Annotated[StreamQuery, Query()],
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=8192)] = None,
) -> Response:
    """All that one browser shows, in one stream without an end. The id of a message is the place in every part.

    Messages `points`, `event` and `log_line` have `{"job_id", "data": [...]}`; nothing is lost or comes
    twice if the stream goes on at its last id. Messages `rows` have `{"rows", "total", "ids", "changed"}`:
    the whole list first, then what changed; `ids` is null where they are the same in the same order.
    """
    context, tenant = context_of(request), principal_of(request).visible_tenant
    places = _places(last_event_id or query.after)
    wanted = [
        Subscription(source, job_id, places.get((source.name, job_id), CurvePlace(0, 0, 0) if source is POINTS else 0))
        for name, (source, _) in _SOURCES.items()
        for job_id in dict.fromkeys(getattr(query, name))
    ]
    if not wanted and not query.rows:
        message = "Name what to show."
        raise InvalidRequest.of(
            (Violation(field="rows", got="nothing", allowed="points, events, logs, rows", message=message),)
        )
    lists = [_list(context, text, tenant) for text in dict.fromkeys(query.rows)]
    with context.database.read() as session:
        found = {job.id for job in store.jobs.find_jobs(session, {job_id for _, job_id, _ in wanted}, tenant)}
    for _, job_id, _ in wanted:
        if job_id not in found:
            raise NotFound(f"there is no job {job_id}")
    streams: Streams = request.app.state.streams
    return streams.open_many(wanted, lists)


def _list(context: AppContext, text: str, tenant: str | None) -> ListSource:
    given = parse_qs(text, keep_blank_values=True)
    repeated = {name for name, known in RowsQuery.model_fields.items() if known.default == ()}
    try:
        query = RowsQuery.model_validate({name: each if name in repeated else each[-1] for name, each in given.items()})
    except ValidationError as error:
        raise InvalidRequest.of(
            tuple(one.model_copy(update={"field": f"rows.{one.field}"}) for one in explain(error, RowsQuery))
        ) from error
    return ListSource(text, tenant, partial(_read_list, context, query, query.filter_for(tenant)))


def _read_list(context: AppContext, query: RowsQuery, wanted: RowFilter, session: Session) -> ListState:
    rows, total = read_rows(session, context, query, wanted)
    return ListState(total, rows[: query.limit])


def _places(cursors: str | None) -> dict[tuple[str, str], Any]:
    """Read where a stream goes on, by the name of the source and the job. Raises InvalidRequest."""
    known = {source.name: num_numbers for source, num_numbers in _SOURCES.values()}
    try:
        found = places_of(cursors) if cursors else {}
        if any(len(numbers) != known[name] or min(numbers) < 0 or max(numbers) > 2**53 for (name, _), numbers in found.items()):
            raise ValueError("not a cursor")
    except (ValueError, KeyError) as error:
        allowed, message = "the id of a message, or a curve's cursor", "Leave it out to begin at the beginning."
        raise InvalidRequest.of((Violation(field="after", got=cursors or "", allowed=allowed, message=message),)) from error
    return {key: CurvePlace(*numbers) if len(numbers) == 3 else numbers[0] for key, numbers in found.items()}
