"""The dependency types of routes: the app's context, the principal who asks, well-formed ids.

They are coroutines because FastAPI would run each function of another kind in a thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Header, Request, Security
from fastapi.openapi.models import HTTPBearer as HTTPBearerModel
from fastapi.security.base import SecurityBase

from octet.api_schemas.quotas import HIGHEST_PRIORITY
from octet.api_schemas.trace_context import TraceContext
from octet.service.access.authentication import Authentication
from octet.service.access.principal import Principal, Right
from octet.service.access.rates import Rates, cost_of
from octet.service.db.engine import Database
from octet.service.errors import Forbidden, NotFound
from octet.service.jobs.admission import Admission
from octet.service.jobs.planning import Planning
from octet.service.jobs.rows import RowTotals, Sparklines
from octet.service.jobs.submissions import Submissions
from octet.service.logs import add_log_fields
from octet.service.scheduling.places import QueuePlaces
from octet.service.settings import Settings
from octet.service.store.ids import is_id


@dataclass(frozen=True)
class AppContext:
    """The parts of one app.

    `admission` checks new jobs, `submissions` stores them, and `places` finds places in the queue;
    `sparklines` draws curves and `row_totals` counts lists; `planning` makes plans; `authentication` finds the
    principal of a request and `rates` limits its requests; `explaining` has the turns of the threads that explain what is
    wrong with a body; `wake` wakes a dispatcher in this process.
    """

    settings: Settings
    database: Database
    wake: Callable[[], None]
    admission: Admission
    submissions: Submissions
    places: QueuePlaces
    sparklines: Sparklines
    row_totals: RowTotals
    planning: Planning
    authentication: Authentication
    rates: Rates
    explaining: CapacityLimiter


def context_of(request: Request) -> AppContext:
    """Return the context of the app that serves a request."""
    context: AppContext = request.app.state.context
    return context


async def _context(request: Request) -> AppContext:
    return context_of(request)


AppContextDep = Annotated[AppContext, Depends(_context)]


LISTS = frozenset({"/v1/jobs", "/v1/rows", "/v1/comparisons", "/v1/audit", "/v1/usage", "/metrics"})
"""The routes that read many rows."""


class _ApiKey(SecurityBase):
    """The check of the API key, and its description in the OpenAPI document. FastAPI solves it without a tree below it."""

    def __init__(self, right: Right | None = None) -> None:
        """right: needed for each request of a route; by default to read for GET, and to change for the others."""
        self.model = HTTPBearerModel(description="Needed where API keys are configured.")
        self.scheme_name = "API key"
        self._right = right

    async def __call__(self, request: Request) -> None:
        authentication = context_of(request).authentication
        principal = await authentication.authenticate(request.headers.get("authorization", ""))
        request.state.principal = principal
        add_log_fields({"principal": principal.name})
        right = self._right or (Right.READ if request.method in {"GET", "HEAD"} else Right.CHANGE)
        if right not in principal.rights:
            raise Forbidden(f"the key of {principal.name} may not {right.name.lower()}; use one with a role that may")
        num_body_bytes = getattr(request.state, "num_body_bytes", 0)
        is_list = request.method == "GET" and request.scope["route"].path in LISTS
        context_of(request).rates.charge(principal, cost_of(num_body_bytes, is_list=is_list))


require_api_key = Security(_ApiKey())
require_scraper = Security(_ApiKey(Right.SCRAPE))
require_admin = Security(_ApiKey(Right.ADMINISTER))


def principal_of(request: Request) -> Principal:
    """Return the principal that the check of the API key found."""
    principal: Principal = request.state.principal
    return principal


def traceparent_of(request: Request) -> str:
    """Return the `traceparent` of a request's own span, which its job keeps."""
    trace: TraceContext = request.state.trace
    return trace.header


def most_priority_of(request: Request) -> int:
    """Return the highest priority that the principal of a request may ask for: the operator any, others by their role."""
    principal = principal_of(request)
    return HIGHEST_PRIORITY if principal.sees_all else context_of(request).settings.quotas.most_priority(principal.role)


async def _most_priority(request: Request) -> int:
    return most_priority_of(request)


MostPriorityDep = Annotated[int, Depends(_most_priority)]


async def _principal(request: Request) -> Principal:
    return principal_of(request)


PrincipalDep = Annotated[Principal, Depends(_principal)]


async def _visible_tenant(request: Request) -> str | None:
    return principal_of(request).visible_tenant


VisibleTenantDep = Annotated[str | None, Depends(_visible_tenant)]


async def _job_id(job_id: str) -> str:
    if not is_id("job", job_id):
        raise NotFound("there is no such job")
    return job_id


JobIdDep = Annotated[str, Depends(_job_id)]
IdempotencyKeyDep = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="The same key and body give the same job again for 24 hours.",
    ),
]
