"""The dependency types of routes: the app's context, the caller's tenant or token, well-formed ids.

They are coroutines because FastAPI would run each function of another kind in a thread.
"""

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request, Security
from fastapi.openapi.models import HTTPBearer as HTTPBearerModel
from fastapi.security.base import SecurityBase

from octet.service.db.engine import Database
from octet.service.errors import NotFound, Unauthenticated
from octet.service.jobs.admission import Admission
from octet.service.jobs.planning import Planning
from octet.service.jobs.rows import RowTotals, Sparklines
from octet.service.jobs.submissions import Submissions
from octet.service.scheduling.places import QueuePlaces
from octet.service.settings import DEFAULT_TENANT, Settings
from octet.service.store.ids import is_id


@dataclass(frozen=True)
class AppContext:
    """The parts of one app.

    `admission` checks new jobs, `submissions` stores them, and `places` finds places in the queue;
    `sparklines` draws curves and `row_totals` counts lists; `planning` makes plans; `wake` wakes a dispatcher in this process.
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


def context_of(request: Request) -> AppContext:
    """Return the context of the app that serves a request."""
    context: AppContext = request.app.state.context
    return context


async def _context(request: Request) -> AppContext:
    return context_of(request)


AppContextDep = Annotated[AppContext, Depends(_context)]


class _ApiKey(SecurityBase):
    """The check of the API key, and its description in the OpenAPI document. FastAPI solves it without a tree below it."""

    def __init__(self) -> None:
        self.model = HTTPBearerModel(description="Needed where API keys are configured.")
        self.scheme_name = "API key"

    async def __call__(self, request: Request) -> None:
        settings = context_of(request).settings
        request.state.tenant = tenant_of(settings, request.headers.get("authorization", ""))


require_api_key = Security(_ApiKey())


def tenant_of_request(request: Request) -> str:
    """Return the tenant that `require_api_key` found."""
    tenant: str = request.state.tenant
    return tenant


def visible_tenant(request: Request) -> str | None:
    """Return the tenant whose jobs the caller may see; None for all. A key without a name is the operator's."""
    tenant = tenant_of_request(request)
    return None if tenant == DEFAULT_TENANT else tenant


async def _visible_tenant(request: Request) -> str | None:
    return visible_tenant(request)


VisibleTenantDep = Annotated[str | None, Depends(_visible_tenant)]


def tenant_of(settings: Settings, authorization: str) -> str:
    """Return the tenant that owns the API key. Without configured keys, loopback is served as the default tenant.

    Raises Unauthenticated for a missing or unknown key.
    """
    known = settings.tenants_by_key_hash
    if not known:
        return DEFAULT_TENANT
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated("an API key is needed: send 'Authorization: Bearer <key>'")
    given = hashlib.sha256(key.encode()).digest()
    # Compares every key: the time tells an attacker nothing.
    found = [tenant for key_hash, tenant in known if hmac.compare_digest(given, key_hash)]
    if not found:
        raise Unauthenticated("the API key is not known here")
    return found[0]


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
