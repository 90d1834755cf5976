"""Submit, change, pause, resume, cancel, retry and delete jobs for a user. Each is one transaction, which the route opens."""

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from octet.api_schemas import (
    AttemptState,
    DesiredState,
    ExportSpec,
    FailureReason,
    JobChange,
    JobSpec,
    JobState,
    JsonScalar,
    Violation,
)
from octet.api_schemas.keys import DEFAULT_TENANT
from octet.api_schemas.quotas import HIGHEST_PRIORITY
from octet.service import store
from octet.service.db.bulk import Transaction
from octet.service.db.tables import JobRow
from octet.service.errors import IdempotencyMismatch, IllegalTransition, InvalidRequest, NotFound
from octet.service.jobs import attempts
from octet.service.jobs.admission import check_priority
from octet.service.jobs.attempts import Ending
from octet.service.jobs.lifecycle import AttemptEvent, JobEvent, next_job_state
from octet.service.jobs.limits import NO_PRICES, Prices, Reached, check_cost, reached
from octet.service.jobs.requests import Request, Submission, earlier, take_keys
from octet.service.jobs.specs import patch_spec, put_level
from octet.service.store.ids import new_ids
from octet.service.store.jobs import NewJob
from octet.service.store.records import Saved

logger = logging.getLogger(__name__)


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
        cloned_from=request.cloned_from,
        traceparent=request.traceparent,
        actor=store.jobs.acting(request.log_fields),
    )


def pause(session: Session, job_id: str, now: datetime, tenant: str | None = None) -> JobRow:
    """Pause a job. Workers that train save a checkpoint first; a job without processes is held at once.

    A second call changes nothing. Raises NotFound, also for another tenant's job, and IllegalTransition once it is over or
    cancelled.
    """
    job = _lock(session, job_id, tenant)
    if job.state not in {JobState.PAUSING, JobState.PAUSED}:
        next_job_state(job.state, JobEvent.PAUSE)
        _stop(session, job, DesiredState.PAUSE, now)
    return job


def resume(session: Session, job_id: str, now: datetime, tenant: str | None = None, prices: Prices = NO_PRICES) -> JobRow:
    """Put a paused job back into the queue, at the place that its age and priority give it.

    A job that is not paused stays as it is. Raises NotFound, also for another tenant's job, and IllegalTransition while
    workers still end, and once the job is over.
    """
    job = _lock(session, job_id, tenant)
    if job.desired not in {DesiredState.RUN, DesiredState.YIELD} or job.state.is_terminal:
        state = next_job_state(job.state, JobEvent.RESUME)
        _check_limit(session, job, now, prices)
        job.state, job.desired = state, DesiredState.RUN
        job.stop_requested_at, job.queued_at = None, now
        store.jobs.add_event(session, job, now, "job.queued", "resumed; it goes on from its newest checkpoint")
    return job


def cancel(session: Session, job_id: str, now: datetime, tenant: str | None = None, *, saves: bool = True) -> JobRow:
    """Cancel a job. A job without processes ends at once; otherwise its workers have to stop, and get some time.

    saves: workers that train save a checkpoint first. A second call changes nothing, unless it no longer wants that
    checkpoint. Raises NotFound, also for another tenant's job, and IllegalTransition once it is over.
    """
    job = _lock(session, job_id, tenant)
    next_job_state(job.state, JobEvent.CANCEL)
    if job.state is not JobState.CANCELLING or (job.desired.saves and not saves):
        _stop(session, job, DesiredState.CANCEL if saves else DesiredState.CANCEL_NOW, now)
    return job


def reach_limit(session: Session, job: JobRow, limit: Reached, now: datetime) -> None:
    """Cancel a job that has taken all that it may, for that reason. Its ranks save a checkpoint first."""
    if job.desired is not DesiredState.RUN:
        return
    job.reason, job.message = FailureReason.LIMIT_REACHED, limit.message
    data: dict[str, JsonScalar] = {limit.field.removeprefix("max_"): limit.taken, limit.field: limit.most}
    store.jobs.add_event(session, job, now, "job.limit_reached", job.message, data=data)
    _stop(session, job, DesiredState.CANCEL, now)


def _check_limit(session: Session, job: JobRow, now: datetime, prices: Prices) -> None:
    """Refuse to go on with a job that has taken all that it may."""
    limits = store.queue.limits_of(job)
    if not any(limits):
        return
    limit = reached(limits, store.queue.taken_by(session, job.id, now), prices.get(job.pool))
    if limit is not None:
        taken = f"{limit.taken:.3g} of {limit.most:.3g} {limit.what}"
        raise IllegalTransition(f"the job has taken {taken}. Change resources.{limit.field} first, or set it to null.")


def retry(
    session: Session,
    job_id: str,
    now: datetime,
    tenant: str | None = None,
    steps: int | None = None,
    most_priority: int = HIGHEST_PRIORITY,
    prices: Prices = NO_PRICES,
) -> JobRow:
    """Put a job that failed or was cancelled back into the queue. It goes on from its newest checkpoint.

    steps: go on to this step, which is later than its last one; so does a job that has succeeded. A job that waits or runs,
    to that step if one is given, stays as it is. most_priority: the highest that the caller may ask for. Raises NotFound, also
    for another tenant's job, IllegalTransition, and InvalidRequest for steps or a priority that the job cannot have.
    """
    job = _lock(session, job_id, tenant)
    event = JobEvent.RETRY if steps is None else JobEvent.EXTEND
    is_live = job.state in {JobState.QUEUED, JobState.STARTING, JobState.RUNNING}
    if is_live and steps in (None, job.spec["training"]["steps"]):
        return job
    next_job_state(job.state, event)
    check_priority(job.priority, most_priority)
    _check_limit(session, job, now, prices)
    _check_no_files_go(session, job)
    if steps is not None:
        if job.num_steps is not None and steps <= job.num_steps:
            message = "Give more steps; to train fewer, clone the job."
            violation = Violation(field="steps", got=str(steps), allowed=f"more than {job.num_steps}", message=message)
            raise InvalidRequest.of((violation,))
        patch_spec(job, {"training": {"steps": steps, "epochs": None}})
        job.steps = None  # the next attempt reports them, as any first one does
    attempts.revive(session, job, event, now)
    return job


def export(
    session: Session,
    job_id: str,
    wanted: ExportSpec,
    now: datetime,
    tenant: str | None = None,
    prices: Prices = NO_PRICES,
) -> JobRow:
    """Put a job that has succeeded back into the queue for an attempt that takes no step: it evaluates, and exports.

    The job has succeeded again however that ends. Its spec has this export from then on; exports of other forms stay.

    Raises NotFound, also for another tenant's job, IllegalTransition for a job that has not succeeded or has no checkpoint of
    its last step, and InvalidRequest for an export that the job cannot have.
    """
    job = _lock(session, job_id, tenant)
    if job.state is not JobState.SUCCEEDED:
        raise IllegalTransition(
            f"the job is {job.state.value}; allowed: succeeded. Set export in a job's spec before it runs: clone this one."
        )
    newest = next(iter(store.records.newest_checkpoints(session, job.id, 1)), None)
    if newest is None or newest.step != job.num_steps:
        raise IllegalTransition("the job has no checkpoint of its last step, which an export is made of. Clone it with export.")
    _check_limit(session, job, now, prices)
    _check_no_files_go(session, job)
    of_all = {"evaluation": {"every": 0}} if job.spec.get("evaluation") else {}  # tasks are run on this one export
    patch_spec(job, {"export": wanted.model_dump(mode="json"), **of_all})
    attempts.revive(session, job, JobEvent.EXPORT, now)
    return job


def change(
    session: Session,
    job_id: str,
    wanted: JobChange,
    now: datetime,
    tenant: str | None = None,
    most_priority: int = HIGHEST_PRIORITY,
    prices: Prices = NO_PRICES,
) -> JobRow:
    """Change the priority, the labels, the limits and the level of a job. What it has already changes nothing.

    most_priority: the highest that the caller may ask for.

    A job that trains saves a checkpoint, and goes on from it at the new level. Raises NotFound, also for another tenant's job,
    IllegalTransition for the priority of a job that is over and for the level of one that has succeeded, is being stopped or
    is part of a comparison, and InvalidRequest for a change that the job cannot have.
    """
    job = _lock(session, job_id, tenant)
    spec = JobSpec.read_stored(job.spec)
    patch: dict[str, Any] = {}
    words = []
    if wanted.priority is not None and wanted.priority != job.priority:
        if job.state.is_terminal:
            raise IllegalTransition(f"the job is {job.state.value}: its priority has no effect. Retry it first, or clone it.")
        check_priority(wanted.priority, most_priority)
        patch["priority"] = wanted.priority
        words.append(f"priority is {wanted.priority}, was {job.priority}")
    labels = {key: value for key, value in (wanted.labels or {}).items() if spec.labels.get(key) != value}
    if labels:
        patch["labels"] = labels
        words += [f"label {key} is {'gone' if value is None else repr(value)}" for key, value in labels.items()]
    given = {} if wanted.resources is None else wanted.resources.model_dump(exclude_unset=True)
    limits = {field: most for field, most in given.items() if getattr(spec.resources, field) != most}
    if limits:
        check_cost(limits.get("max_cost"), job.pool, prices)
        patch["resources"] = limits
        words += [f"{field} is {'none' if most is None else f'{most:g}'}" for field, most in limits.items()]
    if wanted.precision is not None and wanted.precision.level != job.level:
        words.append(_change_level(session, job, wanted.precision.level, now))
    if patch:
        patch_spec(job, patch)
        job.priority = job.spec["priority"]
        store.jobs.put_labels(session, job.id, labels)
    if words:
        store.jobs.add_event(session, job, now, "job.changed", f"changed: {', '.join(words)}"[:4096])
    return job


def _change_level(session: Session, job: JobRow, level: str, now: datetime) -> str:
    """Let a job go on at another level. Returns the words for its event."""
    why_not = None
    if store.comparisons.is_child(session, job.id):
        why_not = "it is part of a comparison, whose arms keep their levels"
    elif job.state in {JobState.SUCCEEDED, JobState.CANCELLING, JobState.PAUSING}:
        why_not = f"it is {job.state.value}"
    if why_not is not None:
        raise IllegalTransition(f"the job cannot go on at another level: {why_not}. Clone it with the level.")
    former = job.level
    put_level(job, {"precision": {"level": level, "ladder": []}})
    if job.state in {JobState.STARTING, JobState.RUNNING} and job.desired is DesiredState.RUN:
        attempts.make_way(session, job, now, f"it goes on at level {level}")
    return f"level is {level}, was {former}"


def delete(session: Session, job_id: str, now: datetime, tenant: str | None = None) -> None:
    """Delete a job that is over, with its events, logs, curve and checkpoints. A loop of the dispatcher deletes its folder.

    Raises NotFound, also for another tenant's job, and IllegalTransition while it is not over or still has processes.
    """
    job = _lock(session, job_id, tenant)
    _check_deletable(session, job)
    store.jobs.delete_job(session, job, now)
    logger.info("job %s (%s) is deleted", job.id, job.name, extra=attempts.log_fields_of(job))


def delete_saved(
    session: Session, table: type[Saved], job_id: str, name: str, now: datetime, tenant: str | None = None, why: str = ""
) -> None:
    """Delete a checkpoint or an export of a job that is over. A loop of the dispatcher deletes its folder.

    name: of the folder, or the id. why: where nobody asked for it. While a job lives, `training.keep` decides which checkpoints
    go: an attempt may resume from any of them. Raises NotFound, also for another tenant's job, and IllegalTransition while the
    job is not over or still has processes.
    """
    job = _lock(session, job_id, tenant)
    row = store.records.find_saved(session, table, job_id, name)
    kind = table.__tablename__.removesuffix("s")
    if row is None:
        raise NotFound(f"job {job_id} has no {kind} {name!r}; its list of {kind}s has their ids")
    _check_deletable(session, job)
    data: dict[str, JsonScalar] = {"step": row.step, "name": row.name, "num_bytes": row.num_bytes}
    message = f"{kind} {row.name} is deleted{why and ': '}{why}"
    store.jobs.add_event(session, job, now, f"{kind}.deleted", message, data=data)
    store.records.delete_saved(session, row)


def _check_deletable(session: Session, job: JobRow) -> None:
    """Refuse to delete what processes of the job may still use."""
    if not job.state.is_terminal:
        change = "Try again once it is cancelled" if job.state is JobState.CANCELLING else "Cancel it first"
        raise IllegalTransition(f"the job is {job.state.value}; delete is not possible. {change}.")
    if any(attempt.released_at is None for attempt in store.jobs.attempts_of(session, job.id)):
        raise IllegalTransition(
            f"the job is {job.state.value}, and its processes are being stopped. Try again in some seconds."
        )


def _check_no_files_go(session: Session, job: JobRow) -> None:
    """Refuse to revive a job while files of it are being deleted: a rank could find half of a checkpoint or an export."""
    if store.records.deleted_files(session, 1, job.id):
        raise IllegalTransition("files of the job are being deleted. Try again in a minute.")


def _lock(session: Session, job_id: str, tenant: str | None) -> JobRow:
    job = store.jobs.lock_job(session, job_id)
    if job is None or tenant not in (None, job.tenant):
        raise NotFound(f"there is no job {job_id}")
    return job


def _stop(session: Session, job: JobRow, desired: DesiredState, now: datetime) -> None:
    """Write that a job has to stop. A job whose attempt has no processes, or that has no attempt, stops at once."""
    job.desired, job.stop_requested_at = desired, now
    is_pause = desired is DesiredState.PAUSE
    if job.state in {JobState.QUEUED, JobState.PAUSED}:
        if is_pause:
            attempts.hold(session, job, JobEvent.PAUSE, now)
        else:
            attempts.end_waiting(session, job, now)
        return
    job.state = next_job_state(job.state, JobEvent.PAUSE if is_pause else JobEvent.CANCEL)
    first = " after a checkpoint" if desired.saves else ", without another checkpoint"
    message = f"asked to stop{first}; the workers hear of it with their next report"
    store.jobs.add_event(session, job, now, f"job.{job.state.value}", message)
    assert job.current_attempt_id is not None, "a job that is not queued has an attempt"
    locked = store.jobs.lock_attempt(session, job.current_attempt_id)
    assert locked is not None
    if locked[1].state is AttemptState.RESERVED:
        attempts.finish(session, job, locked[1], Ending(AttemptEvent.CANCEL, message="stopped before it was launched"), now)
