"""Turns every error into a problem document (RFC 9457), and describes these answers in the OpenAPI document."""

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from starlette.exceptions import HTTPException

from api_schemas import Contract, JobSpec, Problem, ReportBatch, explain_details
from api_schemas.problem import CONTENT_TYPE
from service.errors import (
    MOST_VIOLATIONS,
    InvalidJson,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    NotReady,
    ServiceError,
)

logger = logging.getLogger(__name__)

_DISK_FULL = ("disk is full", "no space left", "disk quota exceeded")  # SQLite, PostgreSQL
_BODIES: dict[str, type[Contract]] = {"spec": JobSpec, "batch": ReportBatch}
_TITLES = {
    400: "The body is not JSON",
    401: "Missing or unknown key or token",
    404: "Not found",
    409: "Conflict with the job's state",
    413: "The body is too large",
    421: "The Host header names another machine",
    422: "Invalid request; `errors` names the fields to change",
    503: "The database does not answer, or no dispatcher leads",
}


Answers = dict[int | str, dict[str, Any]]


def answers(*statuses: int) -> Answers:
    """Describe the `responses` of a route that may answer with these statuses."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": _TITLES[status], "content": {CONTENT_TYPE: {"schema": schema}}} for status in sorted(statuses)
    }


def install(app: FastAPI) -> None:
    """Make the app answer every error with a problem document."""
    for kind in (ServiceError, OperationalError, NoConnectionFree):
        app.add_exception_handler(kind, _expected)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, unexpected)


def expected(request: Request, error: Exception) -> Response | None:
    """Answer an error that a route may raise by design, or the database's. Returns None for another error."""
    if isinstance(error, ServiceError):
        return render(error, request.url.path)
    if isinstance(error, OperationalError | NoConnectionFree):
        return _database_away(request, error)
    return None


def render(error: ServiceError, instance: str | None) -> Response:
    problem: Problem = error.problem(instance)
    return Response(problem.model_dump_json(), error.status, media_type=CONTENT_TYPE, headers=error.headers)


def _expected(request: Request, error: Exception) -> Response:
    answer = expected(request, error)
    assert answer is not None, "the handler is only for these errors"
    return answer


def _invalid(request: Request, error: Exception) -> Response:
    """Say in our words what FastAPI found wrong with path, query, headers or body."""
    assert isinstance(error, RequestValidationError)
    details = error.errors()
    num_left_out, details = len(details[MOST_VIOLATIONS:]), [dict(detail) for detail in details[:MOST_VIOLATIONS]]
    if any(detail["type"] == "json_invalid" for detail in details):
        reason = next(str(detail.get("ctx", {}).get("error", "")) for detail in details if detail["type"] == "json_invalid")
        return render(InvalidJson(f"the body cannot be read as JSON: {reason}"), request.url.path)
    if any(detail["loc"] == ("body",) and isinstance(detail.get("input"), bytes) for detail in details):
        return render(InvalidJson("the body is not JSON; send Content-Type: application/json"), request.url.path)
    root = next((_BODIES[name] for name in _BODIES if name in _body_names(request)), Contract)
    for detail in details:
        detail["loc"] = detail["loc"][1:]  # drops 'body', 'query' or 'header'; the field's name is enough
    return render(InvalidRequest.of(explain_details(details, root), num_left_out), request.url.path)


def _body_names(request: Request) -> list[str]:
    return [parameter.name for parameter in request.scope["route"].dependant.body_params]


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return render(NotFound(f"there is nothing at {request.url.path}"), request.url.path)
    if error.status_code == 405:
        response = render(MethodNotAllowed(f"{request.method} is not possible on {request.url.path}"), request.url.path)
        response.headers.update(error.headers or {})
        return response
    # FastAPI keeps the reason there; what follows a semicolon is Python's advice to its programmers.
    reason = error.detail if error.__cause__ is None else f"{error.detail}: {error.__cause__}".partition(";")[0]
    return render(InvalidJson(f"the request cannot be read: {reason}"), request.url.path)


def _database_away(request: Request, error: Exception) -> Response:
    logger.error("the database failed %s %s: %s", request.method, request.url.path, error)
    words = str(error).lower()
    if any(full in words for full in _DISK_FULL):
        return render(
            NotReady("the database's disk is full: nothing was stored. The operator has to free space."), request.url.path
        )
    return render(NotReady("the database does not answer; try again"), request.url.path)


def unexpected(request: Request, error: Exception) -> Response:
    """Answer an error that nothing here expects, and log it."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return render(ServiceError("an error of ours; the service's log has the details"), request.url.path)
