"""Jobs: submit, validate, list, read, cancel."""

from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import StringConstraints
from sqlalchemy.orm import Session

from api_schemas import Job, JobSpec, JobState, Page, QueuePlace, ValidatedJob, Violation
from service.db.tables import JobRow
from service.deps import IdempotencyKeyDep, JobIdDep, Parts, PartsDep, TenantDep
from service.errors import InvalidRequest, NotFound
from service.jobs import admission, commands, store, store_queue, views
from service.jobs.ids import is_id
from service.routes.pages import page_of
from service.routes.problems import answers
from service.scheduling.plan import plan, pool_states

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_TEXT = r"^[^\x00-\x1f\x7f]*$"
_Label = Annotated[str, StringConstraints(max_length=321, pattern=r"^[^:\x00-\x1f\x7f]+:[^\x00-\x1f\x7f]*$")]
_STARTS_SOON = "it fits and starts with the next pass of the dispatcher"


@router.post("", status_code=201, operation_id="submit_job", responses=answers(400, 413, 422))
def submit(
    spec: JobSpec, parts: PartsDep, tenant: TenantDep, response: Response, idempotency_key: IdempotencyKeyDep = None
) -> Job:
    """Submit a job. 201 means that it is stored and will run, whatever dies after that."""
    known = None
    if idempotency_key is not None:
        with parts.database.read() as session:
            known = commands.replay(session, spec, idempotency_key, parts.database.now(session))
    if known is None:
        admission.check(spec, parts.settings)
    with parts.database.write() as session:
        submission = commands.submit(session, spec, idempotency_key, parts.database.now(session), tenant)
        job = _shown(session, parts, [submission.job])[0]
    if submission.replayed:
        response.headers["Idempotent-Replayed"] = "true"
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    parts.wake()
    return job


@router.post("/validate", operation_id="validate_job", responses=answers(400, 413, 422))
def validate(spec: JobSpec, parts: PartsDep) -> ValidatedJob:
    """The checks of a submission, without the submission: what the job would run as, or the same refusal."""
    admission.check(spec, parts.settings)
    sizes = spec.model.sizes
    return ValidatedJob(
        spec=spec,
        sizes=sizes,
        num_parameters=sizes.num_parameters,
        recipe=spec.precision.resolved_recipe,
        num_block_weights=sizes.num_block_weights,
        micro_batch_size=spec.batch.micro_batch_size,
        tokens_per_step=spec.training.global_batch_size * spec.training.sequence_length,
    )


@router.get("", operation_id="list_jobs", responses=answers(422))
def list_jobs(
    parts: PartsDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(description="the id of the last job of the page before")] = None,
    state: Annotated[tuple[JobState, ...], Query(description="repeat it for several")] = (),
    pool: Annotated[str | None, Query(max_length=32, pattern=_TEXT)] = None,
    name: Annotated[str | None, Query(max_length=100, pattern=_TEXT)] = None,
    label: Annotated[tuple[_Label, ...], Query(description="key:value; repeated, all must match", max_length=16)] = (),
) -> Page[Job]:
    """Jobs, newest first."""
    if after is not None and not is_id("job", after):
        violation = Violation(field="after", got=after, allowed="the id of a job", message="Use last_id of the page before.")
        raise InvalidRequest.of((violation,))
    wanted = store.JobFilter(states=state, pool=pool, name=name, labels=[_label(text) for text in label])
    with parts.database.read() as session:
        rows = store.list_jobs(session, wanted, limit + 1, after)
        return page_of(_shown(session, parts, rows), limit, lambda job: job.id)


@router.get("/{job_id}", operation_id="get_job", responses=answers(404, 422))
def get_job(job_id: JobIdDep, parts: PartsDep) -> Job:
    with parts.database.read() as session:
        row = store.find_job(session, job_id)
        if row is None:
            raise NotFound(f"there is no job {job_id}")
        return _shown(session, parts, [row])[0]


@router.post("/{job_id}/cancel", status_code=202, operation_id="cancel_job", responses=answers(404, 409, 422))
def cancel(job_id: JobIdDep, parts: PartsDep) -> Job:
    """Ask for the end of a job. One that waits is cancelled at once; one that runs saves nothing more and stops."""
    with parts.database.write() as session:
        row = commands.cancel(session, job_id, parts.database.now(session))
        job = _shown(session, parts, [row])[0]
    parts.wake()
    return job


def _shown(session: Session, parts: Parts, rows: Iterable[JobRow]) -> list[Job]:
    rows = list(rows)
    session.flush()
    current = store.current_attempts(session, rows)
    places = _queue_places(session, parts, [row for row in rows if row.state is JobState.QUEUED])
    return [views.job(row, current.get(row.id), places.get(row.id)) for row in rows]


def _queue_places(session: Session, parts: Parts, rows: list[JobRow]) -> dict[str, QueuePlace]:
    """Where queued jobs stand, by the plan that the dispatcher follows; far back in the queue only the number counts."""
    if not rows:
        return {}
    heads = [job for pool in {row.pool for row in rows} for job in store_queue.head_of_queue(session, pool)]
    states = pool_states(parts.settings.pools, store_queue.slots_present(session), store_queue.slots_used(session))
    now = parts.database.now(session)
    decisions = plan(heads, states, now, parts.settings.lease_grace_s)
    places = {each.job_id: QueuePlace(position=each.position, why=each.why or _STARTS_SOON) for each in decisions}
    far_back = {row.id: row.pool for row in rows if row.id not in places}
    for job_id, position in store_queue.positions(session, far_back).items() if far_back else ():
        places[job_id] = QueuePlace(position=position, why=f"{position - 1} jobs are ahead in pool {far_back[job_id]!r}")
    return places


def _label(text: str) -> tuple[str, str]:
    key, _, value = text.partition(":")
    return key, value
