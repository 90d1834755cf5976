"""Shortcuts to the routes that are asked most: to report, to submit a job, to read one or a page. See `http/shortcuts.py`."""

import re
from functools import lru_cache

from anyio.to_thread import run_sync
from fastapi import Response
from pydantic import ValidationError

from api_schemas import JobSpec, ReportBatch, ReportReply
from service.deps import AppContext, is_idempotency_key, tenant_of
from service.http.pages import as_json
from service.http.shortcuts import Shortcut, Usual, route_of
from service.jobs.step_batches import read_step_batch
from service.jobs.usual_reports import SentBatch
from service.routes import jobs, reports
from service.store.ids import is_id
from service.telemetry.control_plane import Telemetry


def shortcuts(context: AppContext, telemetry: Telemetry) -> list[Shortcut]:
    """Make the shortcuts of an app."""

    async def report(usual: Usual) -> Response | None:
        attempt_id, authorization = usual.path_params["attempt_id"], usual.header(b"authorization") or ""
        token = authorization.removeprefix("Bearer ")
        if token == authorization or not usual.is_json or not context.reports.remembers(attempt_id, token):
            return None
        try:
            batch = read_step_batch(usual.body) or ReportBatch.model_validate_json(usual.body)
        except ValidationError:
            return None
        return _answer(await reports.apply(SentBatch(attempt_id, token, batch), context, telemetry))

    async def submit(usual: Usual) -> Response | None:
        key = usual.header(b"idempotency-key")
        if not usual.is_json or not (key is None or is_idempotency_key(key)):
            return None
        tenant = tenant_of(context.settings, usual.header(b"authorization") or "")
        try:
            spec = JobSpec.model_validate_json(usual.body)
        except ValidationError:
            return None
        return await jobs.submit(spec, context, tenant, key)

    async def read(usual: Usual) -> Response | None:
        job_id = usual.path_params["job_id"]
        if not is_id("job", job_id):
            return None
        tenant_of(context.settings, usual.header(b"authorization") or "")
        return await run_sync(jobs.get_job, job_id, context)

    async def read_page(usual: Usual) -> Response | None:
        query = usual.query
        if query is None or not query.keys() <= {"limit", "after"}:
            return None
        limit, after = query.get("limit", str(jobs.PAGE)), query.get("after")
        if not re.fullmatch("[1-9][0-9]?|100", limit) or not (after is None or is_id("job", after)):
            return None
        tenant_of(context.settings, usual.header(b"authorization") or "")
        return await run_sync(jobs.list_jobs, context, int(limit), after)

    return [
        Shortcut(route_of(reports.router, "report"), report),
        Shortcut(route_of(jobs.router, "submit_job"), submit),
        Shortcut(route_of(jobs.router, "get_job"), read),
        Shortcut(route_of(jobs.router, "list_jobs"), read_page, takes_query=True),
    ]


@lru_cache(maxsize=1024)
def _answer(reply: ReportReply) -> Response:
    """Render a reply. A heartbeat is mostly answered as the one before it, and an answer may be sent any number of times."""
    return as_json(reply)
