"""Turns every error into a problem document (RFC 9457), and describes these answers in the OpenAPI document."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from starlette.exceptions import HTTPException
from starlette.routing import Route

from octet.api_schemas import Contract, Problem, explain_details
from octet.api_schemas.problem import CONTENT_TYPE
from octet.service.db.engine import FILE_REPLACED
from octet.service.errors import (
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
_TITLES = {
    400: "The body is not JSON",
    401: "Missing or unknown key or token",
    403: "The role of the key does not allow it",
    404: "Not found",
    409: "Conflict with the job's state",
    413: "The body is too large",
    421: "The Host header names another machine",
    422: "Invalid request; `errors` names the fields to change",
    429: "Too many requests of this tenant; Retry-After says when to send it again",
    503: "The database does not answer, or no dispatcher leads",
}


DATABASE_AWAY = (OperationalError, NoConnectionFree)
"""Errors of a database that does not answer, or that is so busy that no connection to it is free."""

Answers = dict[int | str, dict[str, Any]]


def answers(*statuses: int) -> Answers:
    """Describe the `responses` of a route that may answer with these statuses."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": _TITLES[status], "content": {CONTENT_TYPE: {"schema": schema}}} for status in sorted(statuses)
    }


def install(app: FastAPI) -> None:
    """Make the app answer every error with a problem document."""
    for kind in (ServiceError, *DATABASE_AWAY):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, answer_error)


def answer_error(request: Request, error: Exception) -> Response:
    """Answer an error of a service, of its database, or one that nothing expects, which is logged."""
    if isinstance(error, ServiceError):
        return render(error, request.url.path)
    if isinstance(error, DATABASE_AWAY):
        return _database_away(request, error)
    return _unexpected(request, error)


def render(error: ServiceError, instance: str | None) -> Response:
    problem: Problem = error.problem(instance)
    return Response(problem.model_dump_json(), error.status, media_type=CONTENT_TYPE, headers=dict(error.headers))


def _invalid(request: Request, error: Exception) -> Response:
    """Describe in our words what FastAPI found wrong with path, query or headers."""
    assert isinstance(error, RequestValidationError)
    details = [dict(detail) for detail in error.errors()]
    for detail in details:
        detail["loc"] = detail["loc"][1:]  # drops 'path', 'query' or 'header'; the name is enough
    return render(invalid(details, Contract), request.url.path)


def invalid(details: Sequence[Mapping[str, Any]], root: type[Contract]) -> ServiceError:
    """Build the error of a body that is no JSON, or not what the contract `root` wants. details: as pydantic lists them."""
    reasons = [str(detail.get("ctx", {}).get("error", "")) for detail in details if detail["type"] == "json_invalid"]
    if reasons:
        return InvalidJson(f"the body cannot be read as JSON: {reasons[0]}")
    return InvalidRequest.of(explain_details(details[:MOST_VIOLATIONS], root), len(details[MOST_VIOLATIONS:]))


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return render(NotFound(f"there is nothing at {request.url.path}"), request.url.path)
    if error.status_code == 405:
        response = render(MethodNotAllowed(f"{request.method} is not possible on {request.url.path}"), request.url.path)
        response.headers.update(error.headers or {})
        response.headers.update({"Allow": ", ".join(methods)} if (methods := _methods_of(request)) else {})
        return response
    # FastAPI keeps the reason there; what follows a semicolon is Python's advice to its programmers.
    reason = error.detail if error.__cause__ is None else f"{error.detail}: {error.__cause__}".partition(";")[0]
    return render(InvalidJson(f"the request cannot be read: {reason}"), request.url.path)


def _methods_of(request: Request) -> list[str]:
    """Return the methods that the path has, none for a part with errors of its own. Starlette knows those of one route alone.

    Of several paths the one with the fewest parameters is meant: `/v1/jobs/validate` is no id.
    """
    routes: Sequence[Route] = request.app.state.routes
    matches = [(route, route.path_regex.match(request.url.path)) for route in routes]
    found = [(len(match.groupdict()), route.methods or ()) for route, match in matches if match]
    fewest = min((number for number, _ in found), default=0)
    return sorted({method for number, methods in found if number == fewest for method in methods if method != "HEAD"})


def _database_away(request: Request, error: Exception) -> Response:
    logger.error("the database failed %s %s: %s", request.method, request.url.path, error)
    words = str(error).lower()
    if any(full in words for full in _DISK_FULL):
        return render(
            NotReady("the database's disk is full: nothing was stored. The operator has to free space."), request.url.path
        )
    if FILE_REPLACED in words:
        message = f"the database's file {FILE_REPLACED}: nothing is stored. The operator has to start the server again."
        return render(NotReady(message), request.url.path)
    return render(NotReady("the database does not answer; try again"), request.url.path)


def _unexpected(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return render(ServiceError("an error of ours; the service's log has the details"), request.url.path)
