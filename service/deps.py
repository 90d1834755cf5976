"""What routes ask FastAPI for, as dependency types: the app's context, the caller's tenant or token, well-formed ids."""

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.db.engine import Database
from service.errors import NotFound, Unauthenticated
from service.settings import DEFAULT_TENANT, Settings
from service.store.ids import is_id


@dataclass(frozen=True)
class AppContext:
    """What one app is made of. `wake` tells a dispatcher in this process that it has something to do."""

    settings: Settings
    database: Database
    wake: Callable[[], None]


def _context(request: Request) -> AppContext:
    context: AppContext = request.app.state.context
    return context


AppContextDep = Annotated[AppContext, Depends(_context)]

_BEARER = Security(HTTPBearer(auto_error=False, scheme_name="API key", description="Needed where API keys are configured."))
_ATTEMPT_BEARER = Security(HTTPBearer(auto_error=False, scheme_name="Attempt token", description="Made at launch."))


def require_api_key(context: AppContextDep, credentials: Annotated[HTTPAuthorizationCredentials | None, _BEARER] = None) -> str:
    """Return the tenant that owns the API key. Without configured keys, loopback is served as the default tenant.

    Raises Unauthenticated for a missing or unknown key.
    """
    known = context.settings.tenants_by_key_hash
    if not known:
        return DEFAULT_TENANT
    if credentials is None:
        raise Unauthenticated("an API key is needed: send 'Authorization: Bearer <key>'")
    given = hashlib.sha256(credentials.credentials.encode()).digest()
    found = [
        tenant for key, tenant in known if hmac.compare_digest(given, key)
    ]  # compares every key: the time tells an attacker nothing
    if not found:
        raise Unauthenticated("the API key is not known here")
    return found[0]


def _attempt_token(credentials: Annotated[HTTPAuthorizationCredentials | None, _ATTEMPT_BEARER] = None) -> str:
    if credentials is None:
        raise Unauthenticated("the attempt's token is needed: send 'Authorization: Bearer <token>'")
    return credentials.credentials


def _job_id(job_id: str) -> str:
    if not is_id("job", job_id):
        raise NotFound("there is no such job")
    return job_id


TenantDep = Annotated[str, Depends(require_api_key)]
AttemptTokenDep = Annotated[str, Depends(_attempt_token)]
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
