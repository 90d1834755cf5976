"""API keys of the database: make, list, rotate, revoke. For admins."""

from typing import Annotated

from fastapi import APIRouter, Body, Depends, Query

from octet.api_schemas import Page, Violation
from octet.api_schemas.keys import ApiKey, KeyRotation, KeySpec, NewApiKey
from octet.service import store
from octet.service.access import keys
from octet.service.deps import AppContextDep, PrincipalDep
from octet.service.errors import InvalidRequest, NotFound
from octet.service.http.pages import page_of
from octet.service.http.problems import answers
from octet.service.store.ids import is_id

router = APIRouter(prefix="/v1/keys", tags=["keys"])


async def _key_id(key_id: str) -> str:
    if not is_id("key", key_id):
        raise NotFound("there is no such key")
    return key_id


KeyIdDep = Annotated[str, Depends(_key_id)]


@router.post("", status_code=201, operation_id="create_key", responses=answers(400, 413, 422))
def create(context: AppContextDep, principal: PrincipalDep, wanted: KeySpec) -> NewApiKey:
    """Make a key. Its secret is in this answer and nowhere else."""
    with context.database.write() as session:
        return keys.create(session, wanted, principal, context.database.now(session))


@router.get("", operation_id="list_keys", responses=answers(422))
def list_keys(
    context: AppContextDep,
    principal: PrincipalDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
    after: Annotated[str | None, Query(description="the id of the last key of the page before")] = None,
) -> Page[ApiKey]:
    """Keys, newest first, without their secrets. Those of the file that the server was started with are not among them."""
    if after is not None and not is_id("key", after):
        message = "Use last_id of the page before."
        raise InvalidRequest.of((Violation(field="after", got=after, allowed="the id of a key", message=message),))
    with context.database.read() as session:
        rows = store.keys.list_newest(session, principal.visible_tenant, limit + 1, after)
        return page_of([keys.shown(row) for row in rows], limit, lambda key: key.id)


@router.post("/{key_id}/rotate", status_code=201, operation_id="rotate_key", responses=answers(400, 404, 409, 413, 422))
def rotate(
    key_id: KeyIdDep,
    context: AppContextDep,
    principal: PrincipalDep,
    wanted: Annotated[KeyRotation | None, Body()] = None,
) -> NewApiKey:
    """Make a key in the place of another one, which works for the overlap: a day without a body."""
    with context.database.write() as session:
        made = keys.rotate(session, key_id, wanted or KeyRotation(), principal, context.database.now(session))
    context.authentication.forget()
    return made


@router.post("/{key_id}/revoke", operation_id="revoke_key", responses=answers(404, 422))
def revoke(key_id: KeyIdDep, context: AppContextDep, principal: PrincipalDep) -> ApiKey:
    """Revoke a key. Every process refuses it within a second, and ends its event streams."""
    with context.database.write() as session:
        revoked = keys.revoke(session, key_id, principal, context.database.now(session))
    context.authentication.forget()
    return revoked
