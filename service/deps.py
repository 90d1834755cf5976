"""What routes ask FastAPI for, as dependency types: the app's context, the caller's tenant or token, well-formed ids.

They are coroutines because FastAPI would run each function of another kind in a thread.
"""

import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Header, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.db.engine import Database
from service.errors import NotFound, Unauthenticated
from service.jobs.admission import Admission
from service.jobs.report_batches import ReportBatches
from service.jobs.submissions import Submissions
from service.scheduling.arrivals import Arrivals
from service.scheduling.places import QueuePlaces
from service.settings import DEFAULT_TENANT, Settings
from service.store.ids import is_id

_REPORT_THREADS = 8


@dataclass(frozen=True)
class AppContext:
    """What one app is made of.

    `admission` checks new jobs, `submissions` stores them, `reports` applies what ranks report, `places` finds places in the
    queue and `arrivals` those of new jobs; `wake` tells a dispatcher in this process that it has something to do.
    `report_threads` are for ranks alone, whose token is checked there: however many people read, a rank can renew its lease.
    """

    settings: Settings
    database: Database
    wake: Callable[[], None]
    admission: Admission
    submissions: Submissions
    reports: ReportBatches
    places: QueuePlaces
    arrivals: Arrivals
    report_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_REPORT_THREADS))


async def _context(request: Request) -> AppContext:
    context: AppContext = request.app.state.context
    return context


AppContextDep = Annotated[AppContext, Depends(_context)]

_BEARER = Security(HTTPBearer(auto_error=False, scheme_name="API key", description="Needed where API keys are configured."))
_ATTEMPT_BEARER = Security(HTTPBearer(auto_error=False, scheme_name="Attempt token", description="Made at launch."))


async def require_api_key(
    request: Request, context: AppContextDep, credentials: Annotated[HTTPAuthorizationCredentials | None, _BEARER] = None
) -> str:
    """Return the tenant that owns the API key; see `tenant_of`. The credentials describe the key in the OpenAPI document."""
    return tenant_of(context.settings, request.headers.get("authorization", ""))


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


async def _attempt_token(credentials: Annotated[HTTPAuthorizationCredentials | None, _ATTEMPT_BEARER] = None) -> str:
    if credentials is None:
        raise Unauthenticated("the attempt's token is needed: send 'Authorization: Bearer <token>'")
    return credentials.credentials


async def _job_id(job_id: str) -> str:
    if not is_id("job", job_id):
        raise NotFound("there is no such job")
    return job_id


TenantDep = Annotated[str, Depends(require_api_key)]
AttemptTokenDep = Annotated[str, Depends(_attempt_token)]
JobIdDep = Annotated[str, Depends(_job_id)]
IDEMPOTENCY_KEY = r"^[\x21-\x7e]+$"
IDEMPOTENCY_KEY_MAX_LENGTH = 255
IdempotencyKeyDep = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=IDEMPOTENCY_KEY_MAX_LENGTH,
        pattern=IDEMPOTENCY_KEY,
        description="The same key and body give the same job again for 24 hours.",
    ),
]


def is_idempotency_key(key: str) -> bool:
    """Return True for a key that the header may have, as `IdempotencyKeyDep` checks it."""
    return len(key) <= IDEMPOTENCY_KEY_MAX_LENGTH and re.fullmatch(IDEMPOTENCY_KEY, key) is not None
