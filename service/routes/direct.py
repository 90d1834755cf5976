"""The shortest way of a report: heartbeats and steps are applied where the HTTP server has parsed them, before ASGI.

An ASGI server makes a task and a cycle of messages for each request, which cost more than to apply a heartbeat. Whatever is
unusual about a request is left to the app; see `http/shortcuts.py`. Errors are answered as those of the route.
"""

import re
import time
from collections.abc import Callable

import msgspec
from fastapi import Request, Response

from service.deps import AppContext
from service.http.bodies import MAX_STRANGER_BYTES
from service.http.guards import is_loopback
from service.http.problems import expected, unexpected
from service.http.shortcuts import Usual, route_of
from service.jobs.reports import Applied
from service.jobs.step_batches import read_step_batch
from service.jobs.usual_reports import SentBatch
from service.routes import reports
from service.telemetry.control_plane import Telemetry

_URL = re.compile(rb"/internal/v1/attempts/(\w+)/reports")


class _Reply(msgspec.Struct):
    """The fields of `ReportReply`, which pydantic takes ten times as long to write."""

    desired: str
    lease_s: float
    acknowledged_seq: int


_ENCODE = msgspec.json.Encoder().encode


class DirectReports:
    """Applies the usual reports of ranks that are known. It lives in the event loop of its server."""

    def __init__(self, context: AppContext, telemetry: Telemetry) -> None:
        self._context, self._telemetry = context, telemetry
        self._route = route_of(reports.router, "report")

    def matches(self, method: bytes, url: bytes) -> dict[str, str] | None:
        """Return the id of the attempt whose reports are sent to this URL; None for another request."""
        found = _URL.fullmatch(url) if method == b"POST" else None
        return {"attempt_id": found[1].decode()} if found else None

    def takes(self, usual: Usual) -> bool:
        """Return True if the head of a request is usual. Its body is held in memory then; it has at most 64 KiB."""
        token, num_bytes = _token(usual), usual.num_bytes
        return (
            token is not None
            and num_bytes is not None
            and num_bytes <= MAX_STRANGER_BYTES
            and usual.is_json
            and self._context.reports.remembers(usual.path_params["attempt_id"], token)
            and (not self._context.settings.is_for_this_machine or is_from_here(usual))
        )

    def ask(self, usual: Usual, answer: Callable[[Response | bytes], None]) -> bool:
        """Apply a report that `takes` has looked at soon, and then call `answer`: with the body of a reply (200, JSON), or with
        another response. Returns False, and does nothing, if the body is not usual.
        """
        began = time.perf_counter()
        attempt_id, token = usual.path_params["attempt_id"], _token(usual)
        assert token is not None, "`takes` has seen the token"
        batch = read_step_batch(usual.body)
        if batch is None:
            return False

        def answered(applied: Applied | Exception) -> None:
            response = self._response(applied, usual)
            status = 200 if isinstance(response, bytes) else response.status_code
            self._telemetry.observe_request("POST", self._route.path, status, time.perf_counter() - began)
            answer(response)

        self._context.reports.tell(SentBatch(attempt_id, token, batch), answered)
        return True

    def _response(self, applied: Applied | Exception, usual: Usual) -> Response | bytes:
        if isinstance(applied, Applied):
            reports.observe(applied, self._context, self._telemetry)
            return _ENCODE(_Reply(applied.desired.value, applied.lease_s, applied.acknowledged_seq))
        reports.count_fenced(applied, self._telemetry)
        request = Request(usual.scope)
        return expected(request, applied) or unexpected(request, applied)


def _token(usual: Usual) -> str | None:
    scheme, _, token = (usual.header(b"authorization") or "").partition(" ")
    return token if scheme == "Bearer" and token else None


def is_from_here(usual: Usual) -> bool:
    """Return True if `RefuseOtherHosts` would let the request through, and no web page sent it."""
    return is_loopback(usual.header(b"host") or "") and usual.header(b"origin") is None
