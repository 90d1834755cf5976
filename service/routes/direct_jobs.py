"""The shortest way of a submission: usual ones are taken where the HTTP server has parsed them, before ASGI.

Every check is the route's own: `JobSpec` validates, `Admission` checks, and `routes.jobs` stores. What is
unusual about the head or the body of a request is left to the app, and errors are answered as those of the route.
"""

import asyncio
import time
from collections.abc import Callable

from fastapi import Request, Response
from pydantic import ValidationError

from api_schemas import JobSpec
from service.deps import AppContext, is_idempotency_key, tenant_of
from service.errors import Unauthenticated
from service.http.problems import expected, unexpected
from service.http.shortcuts import Usual, route_of
from service.jobs import requests
from service.jobs.submissions import Stored
from service.routes import jobs
from service.routes.direct import is_from_here
from service.routes.shown import accepted
from service.telemetry.control_plane import Telemetry

MAX_BYTES = 16 << 10
"""The most of a body that is held here. The app has a limit for all bodies together, and this one is for each connection."""


class DirectSubmissions:
    """Takes the usual submissions. It lives in the event loop of its server."""

    def __init__(self, context: AppContext, telemetry: Telemetry) -> None:
        self._context, self._telemetry = context, telemetry
        self._route = route_of(jobs.router, "submit_job")
        self._url = self._route.path.encode()
        self._checking: set[asyncio.Task[Stored]] = set()

    def matches(self, method: bytes, url: bytes) -> dict[str, str] | None:
        """Return an empty dictionary for a submission without a query, and None for another request."""
        return {} if url == self._url and method == b"POST" else None

    def takes(self, usual: Usual) -> bool:
        """Return True for JSON of at most `MAX_BYTES` from a tenant, with a key that is one or without."""
        num_bytes, key = usual.num_bytes, usual.header(b"idempotency-key")
        return (
            num_bytes is not None
            and num_bytes <= MAX_BYTES
            and usual.is_json
            and (key is None or is_idempotency_key(key))
            and (not self._context.settings.is_for_this_machine or is_from_here(usual))
            and self._tenant(usual) is not None
        )

    def ask(self, usual: Usual, answer: Callable[[Response], None]) -> bool:
        """Check and store a job whose head `takes` has looked at, and then call `answer`. Returns False for an invalid body."""
        began = time.perf_counter()
        tenant = self._tenant(usual)
        assert tenant is not None, "`takes` has seen the key of the tenant"
        try:
            spec = JobSpec.model_validate_json(usual.body)
        except ValidationError:
            return False

        def answered(stored: "asyncio.Future[Stored]") -> None:
            if stored.cancelled():  # the server ends, and nobody listens
                return
            response = self._response(Request(usual.scope), stored)
            self._telemetry.observe_request("POST", self._route.path, response.status_code, time.perf_counter() - began)
            answer(response)

        self._store(requests.Request(spec, usual.header(b"idempotency-key"), tenant)).add_done_callback(answered)
        return True

    def _store(self, request: requests.Request) -> "asyncio.Future[Stored]":
        if self._context.admission.passes_now(request.spec):
            return self._context.submissions.ask(request)
        task = asyncio.create_task(jobs.store_checked(request, self._context))
        self._checking.add(task)
        task.add_done_callback(self._checking.discard)
        return task

    def _response(self, request: Request, stored: "asyncio.Future[Stored]") -> Response:
        error = stored.exception()
        if error is None:
            return accepted(stored.result(), self._context)
        assert isinstance(error, Exception), "a future that was cancelled has no answer"
        return expected(request, error) or unexpected(request, error)

    def _tenant(self, usual: Usual) -> str | None:
        try:
            return tenant_of(self._context.settings, usual.header(b"authorization") or "")
        except Unauthenticated:
            return None
