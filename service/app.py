"""The HTTP application: routes, middleware and telemetry put together. Importing it loads neither Ray nor torch."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Depends, FastAPI, Response
from fastapi import Request as HttpRequest
from starlette.routing import BaseRoute

from octet.api_schemas import JobChange, Problem
from octet.api_schemas.comparison import ComparisonSpec
from octet.api_schemas.job_batch import JobBatch
from octet.api_schemas.plan import PlanRequest
from octet.service import page
from octet.service.access.audit import Audit
from octet.service.access.authentication import Authentication
from octet.service.access.rates import Rates
from octet.service.db.bulk import Transaction
from octet.service.db.engine import Database
from octet.service.deps import AppContext, require_admin, require_api_key, require_scraper
from octet.service.http.audit import AuditRequests
from octet.service.http.bodies import LimitBodies
from octet.service.http.guards import RefuseStrangers, refuse_unknown_query
from octet.service.http.problems import answers, install
from octet.service.http.streams import Streams
from octet.service.ingest.app import Ingest, route_to
from octet.service.jobs.admission import Admission
from octet.service.jobs.check_processes import CheckProcesses
from octet.service.jobs.planning import Planning
from octet.service.jobs.requests import Request, Submission
from octet.service.jobs.rows import RowTotals, Sparklines
from octet.service.jobs.submissions import Shown, Submissions
from octet.service.routes import (
    audit,
    catalog,
    comparisons,
    curves,
    exports,
    files,
    jobs,
    keys,
    operations,
    plans,
    records,
    reference,
    rows,
    sign_in,
    stream,
)
from octet.service.routes.job_views import shown_submissions
from octet.service.scheduling.places import QueuePlaces
from octet.service.settings import Settings
from octet.service.telemetry.control_plane import Telemetry, TimeRequests
from octet.service.telemetry.loops import LoopHealth


def create_app(
    settings: Settings,
    *,
    database: Database,
    wake: Callable[[], None] = lambda: None,
    loops: LoopHealth | None = None,
    planning: Planning | None = None,
    checks: CheckProcesses | None = None,
) -> FastAPI:
    """Build the API over a database. A dispatcher in this process has `wake`, counts `loops` and lends its `planning`.

    checks: processes that the app shares with others, and does not end.
    """

    telemetry = Telemetry(settings, database)
    streams = Streams(database, 3 * settings.max_connections // 4, 3 * settings.max_connections_per_address // 4)
    if loops is not None:
        telemetry.registry.register(loops)
    plans_of_app = planning or Planning(settings)
    checks_of_app = checks or CheckProcesses()
    telemetry.registry.register(plans_of_app)
    database.observe = telemetry.process.observe_transaction

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database.migrate()
        if checks is None:
            await run_sync(checks_of_app.start)
        try:
            async with telemetry.process.watching_the_loop():
                yield
            await streams.close()
        finally:  # also where a second signal cancels this
            await authentication.close()
            own = [part.close for part, given in ((plans_of_app, planning), (checks_of_app, checks)) if given is None]
            for end in (authentication.drain, kept_audit.drain, *own):
                await run_sync(end)

    app = _empty_app(lifespan)

    def show(transaction: Transaction, pairs: Sequence[tuple[Request, Submission]]) -> list[Shown]:
        return shown_submissions(transaction, context, pairs)

    ingest = Ingest(database, settings.lease_s, telemetry, wake)
    authentication = Authentication(settings, database)
    kept_audit = Audit(database, telemetry.registry)
    submissions, places = Submissions(database, show), QueuePlaces(database, settings)
    parts = (Admission(settings, checks_of_app), submissions, places, Sparklines(), RowTotals(), plans_of_app, authentication)
    context = AppContext(settings, database, wake, *parts, Rates(settings.requests_per_s), CapacityLimiter(1))
    app.state.context = context
    app.state.telemetry = telemetry
    app.state.streams = streams
    app.state.ingest = ingest
    app.state.audit = kept_audit
    app.router.routes.append(route_to(ingest))
    app.state.routes = _add_routes(app)
    page.mount(app.router)
    install(app)
    _add_middleware(app, context, ingest, telemetry, kept_audit)
    return app


def _add_routes(app: FastAPI) -> list[BaseRoute]:
    """Add the routes of people and of Prometheus, each with the check of its key. Returns those with errors of ours."""
    parts = (rows, stream, jobs, comparisons, plans, records, curves, exports, files, catalog, operations)
    checked = [(part.router, require_api_key) for part in parts]
    checked += [(operations.metrics, require_scraper), (operations.targets, require_scraper)]
    checked += [(keys.router, require_admin), (audit.router, require_admin)]
    for router, check in checked:
        app.include_router(router, dependencies=[check], responses=answers(401, 403, 429))
    open_to_all = [operations.health, reference.router, sign_in.router]
    for router in open_to_all:
        app.include_router(router)
    return [route for router in (*(router for router, _ in checked), *open_to_all) for route in router.routes]


def _add_middleware(app: FastAPI, context: AppContext, ingest: Ingest, telemetry: Telemetry, kept_audit: Audit) -> None:
    """Add what comes before the routes, the innermost first."""
    app.add_middleware(LimitBodies, authenticate=context.authentication.authenticate, verify_token=ingest.tokens.verify)
    if context.settings.is_for_this_machine:
        app.add_middleware(RefuseStrangers)
    app.add_middleware(AuditRequests, audit=kept_audit)
    app.add_middleware(TimeRequests, telemetry=telemetry)


def _empty_app(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    return _Api(
        title="Octet",
        version=version("octet-fp8"),
        summary="Distributed training in 8-bit floating point, as a service",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        separate_input_output_schemas=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # ours are in `telemetry`; it looks for its own
        dependencies=[Depends(refuse_unknown_query)],
        responses=answers(421, 503),
    )


class _Api(FastAPI):
    """FastAPI with two changes to its OpenAPI document: errors are described as our problem document, not as FastAPI's own,
    and what is sent is made once, in a thread. It takes 0.7 s to build, and 2 ms to write as JSON.
    """

    _rendered: bytes | None = None

    def setup(self) -> None:
        self._rendering = asyncio.Lock()
        self.add_route("/openapi.json", self._send_document, include_in_schema=False)

    async def _send_document(self, _request: HttpRequest) -> Response:
        async with self._rendering:
            if self._rendered is None:
                self._rendered = await run_sync(lambda: json.dumps(self.openapi()).encode())
        return Response(self._rendered, media_type="application/json")

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            for contract in (ComparisonSpec, JobBatch, JobChange, PlanRequest, Problem):  # of routes that FastAPI does not read
                schema = contract.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
                schemas |= {**schema.pop("$defs", {}), contract.__name__: schema}
        assert self.openapi_schema is not None
        return self.openapi_schema
