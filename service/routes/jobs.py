"""Jobs: submit, validate, list, read, cancel."""

from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Response
from pydantic import StringConstraints

from api_schemas import Job, JobSpec, JobState, Page, ValidatedJob, Violation
from service import store
from service.deps import AppContext, AppContextDep, IdempotencyKeyDep, JobIdDep, TenantDep
from service.errors import InvalidRequest, NotFound, ServiceError
from service.http.pages import page_as_json
from service.http.problems import answers
from service.jobs import commands, requests
from service.jobs.requests import Request
from service.jobs.submissions import Stored
from service.routes.shown import accepted, rendered_jobs, shown_job
from service.store.ids import is_id

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

PAGE = 20
_TEXT = r"^[^\x00-\x1f\x7f]*$"
_Label = Annotated[str, StringConstraints(max_length=321, pattern=r"^[^:\x00-\x1f\x7f]+:[^\x00-\x1f\x7f]*$")]


@router.post("", status_code=201, response_model=Job, operation_id="submit_job", responses=answers(400, 413, 422))
async def submit(
    spec: JobSpec, context: AppContextDep, tenant: TenantDep, idempotency_key: IdempotencyKeyDep = None
) -> Response:
    """Submit a job. 201 means that it is stored and will run, even if the service is killed after that."""
    return accepted(await store_checked(Request(spec, idempotency_key, tenant), context), context)


async def store_checked(request: Request, context: AppContext) -> Stored:
    """Check a job and store it."""
    try:
        await context.admission.check(request.spec)
    except ServiceError:
        # What was accepted is the same job again, whatever has become of its files.
        if request.idempotency_key is None or not await run_sync(requests.is_replay, context.database, request):
            raise
    return await context.submissions.ask(request)


@router.post("/validate", operation_id="validate_job", responses=answers(400, 413, 422))
async def validate(spec: JobSpec, context: AppContextDep) -> ValidatedJob:
    """Check a job as a submission does, without submitting it. The answer says what it would run as."""
    await context.admission.check(spec)
    sizes = spec.model.sizes
    return ValidatedJob(
        spec=spec,
        sizes=sizes,
        num_parameters=sizes.num_parameters,
        recipe=spec.precision.resolved_recipe,
        num_block_weights=sizes.num_block_weights,
        micro_batch_size=spec.batch.micro_batch_size,
        tokens_per_step=spec.training.global_batch_size * spec.tokens_per_sample,
    )


@router.get("", response_model=Page[Job], operation_id="list_jobs", responses=answers(422))
def list_jobs(
    context: AppContextDep,
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
    wanted = store.shown.JobFilter(states=state, pool=pool, name=name, labels=[_label(text) for text in label])
    with context.database.read() as session:
        rows = store.shown.list_jobs(session, wanted, limit + 1, after)
        rendered = rendered_jobs(session, context, rows[:limit])
    return page_as_json(rendered, [row.id for row in rows[:limit]], has_more=len(rows) > limit)


@router.get("/{job_id}", response_model=Job, operation_id="get_job", responses=answers(404, 422))
def get_job(job_id: JobIdDep, context: AppContextDep) -> Response:
    with context.database.read() as session:
        row = store.shown.find_job(session, job_id)
        if row is None:
            raise NotFound(f"there is no job {job_id}")
        (job,) = rendered_jobs(session, context, [row])
    return Response(job, media_type="application/json")


@router.post("/{job_id}/cancel", status_code=202, operation_id="cancel_job", responses=answers(404, 409, 422))
def cancel(job_id: JobIdDep, context: AppContextDep) -> Job:
    """Cancel a job. A job that waits ends at once; a job that runs saves nothing more and stops."""
    with context.database.write() as session:
        row = commands.cancel(session, job_id, context.database.now(session))
        job = shown_job(session, context, row)
    context.wake()
    return job


def _label(text: str) -> tuple[str, str]:
    key, _, value = text.partition(":")
    return key, value
