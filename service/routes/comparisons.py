"""Comparisons: submit, list, read, pause, resume, cancel, delete."""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Query, Response
from fastapi import Request as HttpRequest
from sqlalchemy.orm import Session

from octet.api_schemas import Page, Violation
from octet.api_schemas.comparison import Comparison, ComparisonSpec
from octet.api_schemas.comparison_report import ComparisonDetails
from octet.service import store
from octet.service.db.tables import ComparisonRow
from octet.service.deps import (
    AppContext,
    AppContextDep,
    IdempotencyKeyDep,
    VisibleTenantDep,
    context_of,
    most_priority_of,
    principal_of,
    traceparent_of,
)
from octet.service.errors import InvalidRequest, NotFound, ServiceError
from octet.service.http.bodies import body_of, read_json
from octet.service.http.pages import as_json, compressed_json, page_of
from octet.service.http.problems import answers
from octet.service.jobs import comparisons
from octet.service.store.ids import is_id

router = APIRouter(prefix="/v1/comparisons", tags=["comparisons"])

PAGE = 20


async def _comparison_id(comparison_id: str) -> str:
    if not is_id("cmp", comparison_id):
        raise NotFound("there is no such comparison")
    return comparison_id


ComparisonIdDep = Annotated[str, Depends(_comparison_id)]


@router.post(
    "",
    status_code=201,
    response_model=Comparison,
    operation_id="submit_comparison",
    responses=answers(400, 413, 422),
    openapi_extra=body_of(ComparisonSpec),
)
async def submit(http_request: HttpRequest, idempotency_key: IdempotencyKeyDep = None) -> Response:
    """Submit a comparison: one job in several arms, paired by seed. Its children are queued as ordinary jobs.

    Every arm is checked as a job of its own. 201 means that it is stored and goes on, even if the service is killed.
    """
    context, spec = context_of(http_request), await read_json(http_request, ComparisonSpec)
    sent, tenant, traceparent = await http_request.body(), principal_of(http_request).tenant, traceparent_of(http_request)

    def is_replay(key: str) -> bool:
        with context.database.read() as session:
            return comparisons.is_replay(session, spec, sent, key, tenant, context.database.now(session))

    def stored() -> tuple[Comparison, bool]:
        with context.database.write() as session:
            now = context.database.now(session)
            row, replayed = comparisons.submit(session, spec, sent, idempotency_key, tenant, now, traceparent)
            return comparisons.shown(row), replayed

    try:
        await _check_children(context, spec, tenant, most_priority_of(http_request))
    except ServiceError:
        # What was accepted is the same comparison again, whatever has become of its files.
        if idempotency_key is None or not await run_sync(is_replay, idempotency_key):
            raise
    comparison, replayed = await run_sync(stored)
    context.wake()
    headers = {"Location": f"/v1/comparisons/{comparison.id}"} | ({"Idempotent-Replayed": "true"} if replayed else {})
    return as_json(comparison, 201, headers)


async def _check_children(context: AppContext, spec: ComparisonSpec, tenant: str, most_priority: int) -> None:
    """Check the job of each arm as a submission does. Raises InvalidRequest with the path of the field in the comparison.

    That arms are the same job is no rule of the contract: with other defaults, a later version has to read what is stored.
    """
    children = [spec.child(arm, spec.child_seeds[0], "") for arm in range(len(spec.arms))]
    unnamed = [child.model_copy(update={"name": "", "labels": {}}) for child in children]
    for arm, child in enumerate(children):
        if (first := unnamed.index(unnamed[arm])) < arm:
            got, message = (
                f"{spec.arms[first].name} and {spec.arms[arm].name}",
                "These arms are the same job. Remove one of them.",
            )
            raise InvalidRequest.of((Violation(field="vary", got=got, allowed="each job once", message=message),))
        try:
            await context.admission.check(child, tenant, most_priority)
        except InvalidRequest as error:
            raise type(error).of(tuple(_moved(each, spec.arms[arm].name) for each in error.errors)) from error


def _moved(violation: Violation, arm: str) -> Violation:
    """Return what is wrong with the job of an arm, with the path of the field in the comparison."""
    message = f"Arm {arm} could not run here. {violation.message}"
    return violation.model_copy(update={"field": f"job.{violation.field}", "message": message})


@router.get("", operation_id="list_comparisons", responses=answers(422))
def list_comparisons(
    context: AppContextDep,
    tenant: VisibleTenantDep,
    limit: Annotated[int, Query(ge=1, le=100)] = PAGE,
    after: Annotated[str | None, Query(description="the id of the last comparison of the page before")] = None,
) -> Page[Comparison]:
    """Comparisons, newest first, without their children and what they show."""
    if after is not None and not is_id("cmp", after):
        message = "Use last_id of the page before."
        raise InvalidRequest.of((Violation(field="after", got=after, allowed="the id of a comparison", message=message),))
    with context.database.read() as session:
        found: list[Comparison] = []
        # Those that cannot be read are left out, so a page may take more than one look.
        while len(found) <= limit:
            rows = store.comparisons.list_newest(session, tenant, limit + 1, after)
            found += comparisons.readable(rows)
            if len(rows) <= limit:
                break
            after = rows[-1].id
        return page_of(found, limit, lambda each: each.id)


@router.get("/{comparison_id}", response_model=ComparisonDetails, operation_id="get_comparison", responses=answers(404, 422))
def get_comparison(request: HttpRequest, comparison_id: ComparisonIdDep) -> Response:
    """A comparison with its children and what they show so far: gaps with intervals, bytes, speed, and a verdict in words."""
    with context_of(request).database.read() as session:
        row = store.comparisons.find(session, comparison_id, principal_of(request).visible_tenant)
        if row is None:
            raise NotFound(f"there is no comparison {comparison_id}")
        found = comparisons.details(session, row)
    return compressed_json(request, found.model_dump_json())


@router.post("/{comparison_id}/pause", status_code=202, operation_id="pause_comparison", responses=answers(404, 409, 422))
def pause(comparison_id: ComparisonIdDep, context: AppContextDep, tenant: VisibleTenantDep) -> Comparison:
    """Pause a comparison: all of its children that wait or run are paused, and no more are queued."""
    return _change(context, lambda session, now: comparisons.pause(session, comparison_id, now, tenant))


@router.post("/{comparison_id}/resume", status_code=202, operation_id="resume_comparison", responses=answers(404, 409, 422))
def resume(comparison_id: ComparisonIdDep, context: AppContextDep, tenant: VisibleTenantDep) -> Comparison:
    """Let a paused comparison go on, with all of its paused children."""
    return _change(context, lambda session, now: comparisons.resume(session, comparison_id, now, tenant))


@router.post("/{comparison_id}/cancel", status_code=202, operation_id="cancel_comparison", responses=answers(404, 409, 422))
def cancel(
    comparison_id: ComparisonIdDep,
    context: AppContextDep,
    tenant: VisibleTenantDep,
    save: Annotated[bool, Query(description="false: children save no checkpoint first")] = True,
) -> Comparison:
    """Cancel a comparison and all of its children that wait or run. What the others have shown stays."""
    return _change(context, lambda session, now: comparisons.cancel(session, comparison_id, now, tenant, saves=save))


@router.delete("/{comparison_id}", status_code=204, operation_id="delete_comparison", responses=answers(404, 409, 422))
def delete(comparison_id: ComparisonIdDep, context: AppContextDep, tenant: VisibleTenantDep) -> None:
    """Delete a comparison that is over, with its report. Its jobs stay."""
    with context.database.write() as session:
        comparisons.delete(session, comparison_id, tenant)


def _change(context: AppContext, change: Callable[[Session, datetime], ComparisonRow]) -> Comparison:
    with context.database.write() as session:
        comparison = comparisons.shown(change(session, context.database.now(session)))
    context.wake()
    return comparison
