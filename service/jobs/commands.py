"""Submit and cancel jobs for a user. Each is one transaction, which the route opens."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.orm import Session

from octet.api_schemas import AttemptState, DesiredState, JobSpec, JobState
from octet.service import store
from octet.service.db.bulk import Transaction
from octet.service.db.tables import JobRow
from octet.service.errors import IdempotencyMismatch, IllegalTransition, NotFound
from octet.service.jobs import attempts
from octet.service.jobs.attempts import Ending
from octet.service.jobs.lifecycle import AttemptEvent, JobEvent, next_job_state
from octet.service.jobs.requests import Request, Submission, earlier, take_keys
from octet.service.settings import DEFAULT_TENANT
from octet.service.store.ids import new_ids
from octet.service.store.jobs import NewJob


def submit(
    session: Session, spec: JobSpec, idempotency_key: str | None, now: datetime, tenant: str = DEFAULT_TENANT
) -> Submission:
    """Store a job, its first event and its place in the queue; or find the job that the tenant used this key for."""
    after = store.jobs.newest_job(session).id
    (submission,) = submit_all(session, [Request(spec, idempotency_key, tenant)], now, after)
    if isinstance(submission, IdempotencyMismatch):
        raise submission
    return submission


def submit_all(
    transaction: Transaction, requests: Sequence[Request], now: datetime, after: str | None
) -> list[Submission | IdempotencyMismatch]:
    """Submit several jobs in one transaction. A request with a mismatched key changes nothing and gets the error.

    after: the id that sorts last of all jobs; the new ids sort after it.
    """
    job_ids = new_ids("job", now, len(requests), after)
    taken = take_keys(transaction, requests, job_ids, now)
    results: list[Submission | IdempotencyMismatch] = []
    new: dict[str, NewJob] = {}
    for request, job_id in zip(requests, job_ids, strict=True):
        key = request.idempotency_key
        if key is None or job_id in taken:
            new[job_id] = _new_job(request, job_id, now)
            results.append(Submission(new[job_id], replayed=False))
            continue
        try:
            results.append(earlier(transaction, request, key, now, new))
        except IdempotencyMismatch as mismatch:
            results.append(mismatch)
    store.jobs.add_jobs(transaction, list(new.values()), now)
    return results


def _new_job(request: Request, job_id: str, now: datetime) -> NewJob:
    spec, wanted = request.spec, request.spec.resources
    return NewJob(
        id=job_id,
        name=spec.name,
        tenant=request.tenant,
        pool=wanted.pool,
        workers=wanted.workers,
        min_workers=wanted.min_workers,
        priority=spec.priority,
        level=spec.precision.level,
        spec_text=request.spec_text,
        labels=spec.labels,
        created_at=now,
    )


def cancel(session: Session, job_id: str, now: datetime, tenant: str | None = None) -> JobRow:
    """Cancel a job. A job without processes ends at once; otherwise its workers have to stop, and get some time.

    A second call changes nothing. Raises NotFound, also for another tenant's job, and IllegalTransition once it is over.
    """
    job = store.jobs.lock_job(session, job_id)
    if job is None or tenant not in (None, job.tenant):
        raise NotFound(f"there is no job {job_id}")
    if job.state.is_terminal:
        raise IllegalTransition(f"job {job_id} is {job.state.value}; a job that is over cannot be cancelled.")
    if job.state is JobState.CANCELLING:
        return job
    job.desired = DesiredState.CANCEL
    job.cancel_requested_at = now
    if job.state is JobState.QUEUED:
        attempts.end_queued(session, job, now)
        return job
    job.state = next_job_state(job.state, JobEvent.CANCEL)
    store.jobs.add_event(session, job, now, "job.cancelling", "asked to stop; the workers hear of it with their next report")
    assert job.current_attempt_id is not None, "a job that is not queued has an attempt"
    locked = store.jobs.lock_attempt(session, job.current_attempt_id)
    assert locked is not None
    if locked[1].state is AttemptState.RESERVED:
        attempts.finish(session, job, locked[1], Ending(AttemptEvent.CANCEL, message="cancelled before it was launched"), now)
    return job
