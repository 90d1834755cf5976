"""Jobs: submit, clone, validate, list, read, change, pause, resume, cancel, retry, delete."""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Body, Query, Response
from fastapi import Request as HttpRequest
from pydantic import StringConstraints
from sqlalchemy.orm import Session

from octet.api_schemas import ExportSpec, Job, JobChange, JobSpec, JobState, Page, ValidatedJob, Violation
from octet.api_schemas.job_batch import JobBatch, SubmittedJobs
from octet.api_schemas.planned_states import validated
from octet.service import store
from octet.service.db.tables import JobRow
from octet.service.deps import (
    AppContext,
    AppContextDep,
    IdempotencyKeyDep,
    JobIdDep,
    MostPriorityDep,
    VisibleTenantDep,
    context_of,
    most_priority_of,
    principal_of,
    traceparent_of,
)
from octet.service.errors import InvalidRequest, NotFound, ServiceError
from octet.service.http.bodies import PATCH_OF_SPEC, body_of, read_json, read_patch
from octet.service.http.pages import page_as_json
from octet.service.http.problems import answers
from octet.service.jobs import commands, requests
from octet.service.jobs.admission import check_export
from octet.service.jobs.requests import Request, key_in_batch
from octet.service.jobs.specs import changed, naming, specs_of
from octet.service.jobs.submissions import Stored
from octet.service.routes.job_views import accepted, all_accepted, existing_job, rendered_jobs, shown_job
from octet.service.store.ids import is_id

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

PAGE = 20
_TEXT = r"^[^\x00-\x1f\x7f]*$"
_Label = Annotated[str, StringConstraints(max_length=321, pattern=r"^[^:\x00-\x1f\x7f]+:[^\x00-\x1f\x7f]*$")]


@router.post(
    "",
    status_code=201,
    response_model=Job,
    operation_id="submit_job",
    responses=answers(400, 413, 422),
    openapi_extra=body_of(JobSpec),
)
async def submit(http_request: HttpRequest, idempotency_key: IdempotencyKeyDep = None) -> Response:
    """Submit a job. 201 means that it is stored and will run, even if the service is killed after that."""
    context = context_of(http_request)
    spec, sent = await read_json(http_request, JobSpec), await http_request.body()
    request = Request(spec, idempotency_key, principal_of(http_request).tenant, sent, traceparent=traceparent_of(http_request))
    return accepted(await _store_checked(request, context, most_priority_of(http_request)), context)


@router.post(
    "/batch",
    status_code=201,
    response_model=SubmittedJobs,
    operation_id="submit_jobs",
    responses=answers(400, 413, 422),
    openapi_extra=body_of(JobBatch),
)
async def submit_batch(http_request: HttpRequest, idempotency_key: IdempotencyKeyDep = None) -> Response:
    """Submit several jobs, each a change of one. 201 means that all are stored; otherwise none is."""
    context, principal = context_of(http_request), principal_of(http_request)
    batch, sent = await read_json(http_request, JobBatch), await http_request.body()
    context.rates.charge(principal, len(batch.changes) - 1.0)
    wanted = []
    for number, spec in enumerate(await run_sync(specs_of, batch)):
        key = key_in_batch(idempotency_key, number)
        wanted.append(Request(spec, key, principal.tenant, sent, traceparent=traceparent_of(http_request)))
        with naming(number):
            await _check(wanted[-1], context, most_priority_of(http_request))
    stored = await run_sync(context.submissions.submit_together, wanted)
    return all_accepted(stored, context)


async def _store_checked(request: Request, context: AppContext, most_priority: int) -> Stored:
    await _check(request, context, most_priority)
    return await context.submissions.submit_async(request)


async def _check(request: Request, context: AppContext, most_priority: int) -> None:
    try:
        await context.admission.check(request.spec, request.tenant, most_priority)
    except ServiceError:
        # What was accepted is the same job again, whatever has become of its files.
        if request.idempotency_key is None or not await run_sync(requests.is_replay, context.database, request):
            raise


@router.post("/validate", operation_id="validate_job", responses=answers(400, 413, 422), openapi_extra=body_of(JobSpec))
async def validate(http_request: HttpRequest, context: AppContextDep, most_priority: MostPriorityDep) -> ValidatedJob:
    """Check a job as a submission does, without submitting it. The answer says what it would run as, and hold."""
    spec = await read_json(http_request, JobSpec)
    await context.admission.check(spec, principal_of(http_request).tenant, most_priority)
    return await run_sync(validated, spec)


@router.post(
    "/{job_id}/clone",
    status_code=201,
    response_model=Job,
    operation_id="clone_job",
    responses=answers(400, 404, 413, 422),
    openapi_extra=PATCH_OF_SPEC,
)
async def clone(http_request: HttpRequest, job_id: JobIdDep, idempotency_key: IdempotencyKeyDep = None) -> Response:
    """Submit the spec of a job once more, as it is or with a patch, as a job of its own. It starts from the beginning."""
    context, patch = context_of(http_request), await read_patch(http_request, JobSpec)
    source = await run_sync(_spec_of, context, job_id, principal_of(http_request).visible_tenant)
    sent = b'{"clone": "%s", "patch": %s}' % (job_id.encode(), await http_request.body() or b"{}")
    tenant, traceparent = principal_of(http_request).tenant, traceparent_of(http_request)
    request = Request(changed(source, patch), idempotency_key, tenant, sent, job_id, traceparent)
    return accepted(await _store_checked(request, context, most_priority_of(http_request)), context)


def _spec_of(context: AppContext, job_id: str, tenant: str | None) -> JobSpec:
    with context.database.read() as session:
        return JobSpec.read_stored(existing_job(session, job_id, tenant).spec)


@router.get("", response_model=Page[Job], operation_id="list_jobs", responses=answers(422))
def list_jobs(
    request: HttpRequest,
    limit: Annotated[int, Query(ge=1, le=100)] = PAGE,
    after: Annotated[str | None, Query(description="the id of the last job of the page before")] = None,
    state: Annotated[tuple[JobState, ...], Query(description="repeat it for several")] = (),
    pool: Annotated[str | None, Query(max_length=32, pattern=_TEXT)] = None,
    name: Annotated[str | None, Query(max_length=100, pattern=_TEXT)] = None,
    label: Annotated[tuple[_Label, ...], Query(description="key:value; repeated, all must match", max_length=16)] = (),
) -> Response:
    """Jobs, newest first."""
    if after is not None and not is_id("job", after):
        violation = Violation(field="after", got=after, allowed="the id of a job", message="Use last_id of the page before.")
        raise InvalidRequest.of((violation,))
    context, tenant, labels = context_of(request), principal_of(request).visible_tenant, [_label(text) for text in label]
    wanted = store.job_queries.JobFilter(states=state, pool=pool, name=name, tenant=tenant, labels=labels)
    with context.database.read() as session:
        rows = store.job_queries.list_jobs(session, wanted, limit + 1, after)
        rendered = rendered_jobs(session, context, rows[:limit])
    return page_as_json(rendered, [row.id for row in rows[:limit]], has_more=len(rows) > limit)


@router.get("/{job_id}", response_model=Job, operation_id="get_job", responses=answers(404, 422))
def get_job(job_id: JobIdDep, context: AppContextDep, tenant: VisibleTenantDep) -> Response:
    with context.database.read() as session:
        row = store.job_queries.find_job(session, job_id, tenant)
        if row is None:
            raise NotFound(f"there is no job {job_id}")
        (job,) = rendered_jobs(session, context, [row])
    return Response(job, media_type="application/json")


@router.patch(
    "/{job_id}", operation_id="change_job", responses=answers(400, 404, 409, 413, 422), openapi_extra=body_of(JobChange)
)
async def change(http_request: HttpRequest, job_id: JobIdDep, context: AppContextDep, tenant: VisibleTenantDep) -> Job:
    """Change the labels of a job, and the priority of one that is not over. A job that runs goes on."""
    wanted = await read_json(http_request, JobChange)
    most, prices = most_priority_of(http_request), context.settings.slot_hour_prices
    return await run_sync(
        _change, context, lambda session, now: commands.change(session, job_id, wanted, now, tenant, most, prices)
    )


@router.post("/{job_id}/cancel", status_code=202, operation_id="cancel_job", responses=answers(404, 409, 422))
def cancel(
    job_id: JobIdDep,
    context: AppContextDep,
    tenant: VisibleTenantDep,
    save: Annotated[bool, Query(description="false: do not save a checkpoint first")] = True,
) -> Job:
    """Cancel a job. A job that waits ends at once; a job that runs saves a checkpoint and stops.

    Sent again with `save=false`, it stops without that checkpoint.
    """
    return _change(context, lambda session, now: commands.cancel(session, job_id, now, tenant, saves=save))


@router.post("/{job_id}/pause", status_code=202, operation_id="pause_job", responses=answers(404, 409, 422))
def pause(job_id: JobIdDep, context: AppContextDep, tenant: VisibleTenantDep) -> Job:
    """Pause a job. A job that waits is held; a job that runs saves a checkpoint after its step, and frees its slots."""
    return _change(context, lambda session, now: commands.pause(session, job_id, now, tenant))


@router.post("/{job_id}/resume", status_code=202, operation_id="resume_job", responses=answers(404, 409, 422))
def resume(job_id: JobIdDep, context: AppContextDep, tenant: VisibleTenantDep) -> Job:
    """Put a paused job back into the queue. It goes on from its newest checkpoint, to the bit as if nobody had paused it."""
    prices = context.settings.slot_hour_prices
    return _change(context, lambda session, now: commands.resume(session, job_id, now, tenant, prices))


@router.post("/{job_id}/retry", status_code=202, operation_id="retry_job", responses=answers(404, 409, 422))
def retry(
    job_id: JobIdDep,
    context: AppContextDep,
    tenant: VisibleTenantDep,
    most: MostPriorityDep,
    steps: Annotated[
        int | None, Query(ge=1, le=100_000_000, description="go on to this step, which is later than the last one")
    ] = None,
) -> Job:
    """Put a job that failed or was cancelled back into the queue. It goes on from its newest checkpoint.

    With `steps` it goes on further than its spec said, and so does a job that has succeeded.
    """
    prices = context.settings.slot_hour_prices
    return _change(context, lambda session, now: commands.retry(session, job_id, now, tenant, steps, most, prices))


@router.post("/{job_id}/exports", status_code=202, operation_id="export_job", responses=answers(400, 404, 409, 413, 422))
def export(
    job_id: JobIdDep, context: AppContextDep, tenant: VisibleTenantDep, wanted: Annotated[ExportSpec | None, Body()] = None
) -> Job:
    """Export a job that has succeeded: an attempt with its ranks goes on from its last checkpoint, and takes no step.

    The job waits for slots as any other, and is over again when the export is in its list. Without a body: in bf16.
    """
    spec, prices = wanted or ExportSpec(), context.settings.slot_hour_prices
    check_export(spec, context.settings)
    return _change(context, lambda session, now: commands.export(session, job_id, spec, now, tenant, prices))


@router.delete("/{job_id}", status_code=204, operation_id="delete_job", responses=answers(404, 409, 422))
def delete(job_id: JobIdDep, context: AppContextDep, tenant: VisibleTenantDep) -> None:
    """Delete a job that is over, with its events, logs, curve and checkpoints. Its folder goes within a minute."""
    with context.database.write() as session:
        commands.delete(session, job_id, context.database.now(session), tenant)


def _change(context: AppContext, change: Callable[[Session, datetime], JobRow]) -> Job:
    """Change a job in one transaction, and show it as it is then."""
    with context.database.write() as session:
        job = shown_job(session, context, change(session, context.database.now(session)))
    context.wake()
    return job


def _label(text: str) -> tuple[str, str]:
    key, _, value = text.partition(":")
    return key, value
