"""The audit, for admins."""

from typing import Annotated

from fastapi import APIRouter, Query, Request

from octet.api_schemas import Page, Violation
from octet.api_schemas.keys import AuditRecord
from octet.service import store
from octet.service.access.audit import Audit
from octet.service.deps import AppContextDep, VisibleTenantDep
from octet.service.errors import InvalidRequest
from octet.service.http.pages import page_of
from octet.service.http.problems import answers
from octet.service.jobs import views
from octet.service.store.ids import is_id

router = APIRouter(prefix="/v1/audit", tags=["keys"])


@router.get("", operation_id="list_audit", responses=answers(422))
def list_audit(
    request: Request,
    context: AppContextDep,
    tenant: VisibleTenantDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(description="the id of the last record of the page before")] = None,
) -> Page[AuditRecord]:
    """Requests that were to change something, and those that were refused for their key, newest first."""
    if after is not None and not is_id("aud", after):
        message = "Use last_id of the page before."
        raise InvalidRequest.of((Violation(field="after", got=after, allowed="the id of a record", message=message),))
    audit: Audit = request.app.state.audit
    audit.drain()  # what this process has answered before
    with context.database.read() as session:
        rows = store.audit.list_newest(session, tenant, limit + 1, after)
        return page_of([views.record(AuditRecord, row) for row in rows], limit, lambda record: record.id)
