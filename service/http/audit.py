"""Middleware that records requests in the audit, and says in the log which request a line is about.

Each request has a number, which its answer carries as X-Request-ID, and a span of a trace (W3C Trace Context): a child of the
caller's where the request has a valid `traceparent`, of a new trace otherwise. An answer carries no `traceparent`: that header
is for requests alone. A job shows its trace as `trace_id`.
"""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octet.api_schemas.trace_context import TraceContext
from octet.service.access.audit import Audit
from octet.service.logs import add_log_fields, fields_of_trace

_BY_TOKENS = "/internal/v1/attempts/"
"""The path of ranks, which have tokens of their own and change their attempt every few seconds."""
_CHANGES_NOTHING = {"/v1/jobs/validate", "/v1/plans"}
_READS = {"GET", "HEAD", "OPTIONS"}
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,64}")


class AuditRequests:
    """Records each request whose principal is known and that is to change something, and each 401 and 403.

    What a request's code logs has its number, its trace, and its principal once that is known. `request.state.trace` has its
    span.
    """

    def __init__(self, app: ASGIApp, audit: Audit) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_BY_TOKENS):
            await self._app(scope, receive, send)
            return
        request_id, trace, has_begun = _request_id_of(scope), _span_of(scope), False
        scope.setdefault("state", {})["trace"] = trace

        async def recorded(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._record(scope, request_id, message["status"])
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id.encode())]}
            await send(message)

        # Until the end of the request's task: what handles an exception is outside of this.
        add_log_fields({"request_id": request_id, **fields_of_trace(trace)})
        try:
            await self._app(scope, receive, recorded)
        except Exception:
            if not has_begun:
                self._record(scope, request_id, 500)
            raise

    def _record(self, scope: Scope, request_id: str, status: int) -> None:
        principal = scope.get("state", {}).get("principal")
        method, path = scope["method"], scope["path"]
        # A refusal for sending too much is not recorded: the records would be as many, and reports wait for their commits.
        is_change = principal is not None and method not in _READS and path not in _CHANGES_NOTHING and status != 429
        if is_change or status in {401, 403}:
            address = (scope.get("client") or ("",))[0]
            self._audit.record(principal, method, path, address=address, request_id=request_id, status=status)


def _request_id_of(scope: Scope) -> str:
    """Return the request's X-Request-ID, which a proxy may have set; a new one if it has none that can be shown."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _span_of(scope: Scope) -> TraceContext:
    """Make the span of a request. A `traceparent` that is wrong, or that comes twice, is ignored, and a new trace begins."""
    given = [value for name, value in scope["headers"] if name == b"traceparent"]
    caller = TraceContext.parse(given[0].decode("latin-1")) if len(given) == 1 else None
    return TraceContext.begin() if caller is None else caller.child()
