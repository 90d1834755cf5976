"""What a user can do to a job: submit and cancel. Each is one transaction, which the route opens."""

import hashlib
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from api_schemas import AttemptState, DesiredState, JobSpec, JobState
from service import store
from service.db.tables import JobRow
from service.errors import IdempotencyMismatch, IllegalTransition, NotFound
from service.jobs import attempts
from service.jobs.attempts import Ending
from service.jobs.lifecycle import AttemptEvent, JobEvent, next_job_state
from service.settings import DEFAULT_TENANT
from service.store.ids import new_id


@dataclass(frozen=True)
class Submission:
    """A submitted job. `replayed` is true if an earlier submission with the same idempotency key stored it."""

    job: JobRow
    replayed: bool


def submit(
    session: Session, spec: JobSpec, idempotency_key: str | None, now: datetime, tenant: str = DEFAULT_TENANT
) -> Submission:
    """Store a job, its first event and its place in the queue; or find the job that this key was used for."""
    job_id = new_id("job", now, after=store.jobs.last_job_id(session))
    if idempotency_key is not None and not store.jobs.take_idempotency_key(session, idempotency_key, _hash(spec), job_id, now):
        earlier = replay(session, spec, idempotency_key, now)
        assert earlier is not None, "a key that is taken has a job"
        return earlier
    job = JobRow(
        id=job_id,
        name=spec.name,
        tenant=tenant,
        state=JobState.QUEUED,
        desired=DesiredState.RUN,
        pool=spec.resources.pool,
        workers=spec.resources.workers,
        priority=spec.priority,
        spec=spec.model_dump(mode="json"),
        created_at=now,
        queued_at=now,
    )
    store.jobs.add_job(session, job, spec.labels)
    store.jobs.add_event(session, job, now, "job.accepted", f"accepted into pool {job.pool!r} with priority {job.priority}")
    return Submission(job, replayed=False)


def replay(session: Session, spec: JobSpec, idempotency_key: str, now: datetime) -> Submission | None:
    """Find the job that this key was used for in the last 24 hours. Raises IdempotencyMismatch if its spec differs."""
    used = store.jobs.find_idempotency_key(session, idempotency_key, now)
    if used is None:
        return None
    if used.body_hash != _hash(spec):
        raise IdempotencyMismatch(
            f"Idempotency-Key {idempotency_key!r} was used for another job, {used.job_id}. Use a new key for a new job."
        )
    job = store.jobs.find_job(session, used.job_id)
    assert job is not None, "jobs are never deleted"
    return Submission(job, replayed=True)


def cancel(session: Session, job_id: str, now: datetime) -> JobRow:
    """Cancel a job. A job without processes ends at once; otherwise its workers are told to stop and get some time.

    A second call changes nothing. Raises NotFound, and IllegalTransition once the job is over.
    """
    job = store.jobs.lock_job(session, job_id)
    if job is None:
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


def _hash(spec: JobSpec) -> str:
    return hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
