"""Changes of an attempt and of its job: reserve, launched, started, finish.

Every function runs in the caller's transaction with the job's row locked, moves both along `lifecycle`, and writes the
events. Only `finish` decides if a failed job is tried again.
"""

import logging
import zlib
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import inf
from typing import get_args

from sqlalchemy.orm import Session

from octet.api_schemas import AttemptState, Blame, DesiredState, FailureReason, JobSpec, JobState, JobSummary, JsonScalar
from octet.api_schemas.base import merge_patch
from octet.api_schemas.job_plan import JobPlan, quotient
from octet.api_schemas.levels import AUTOMATIC
from octet.api_schemas.planned_states import NotPlanned, states_of
from octet.api_schemas.report import StartPhase
from octet.service import store
from octet.service.db.tables import AttemptRow, JobRow
from octet.service.jobs import retries
from octet.service.jobs.lifecycle import AttemptEvent, JobEvent, next_attempt_state, next_job_state
from octet.service.jobs.specs import put_level
from octet.service.logs import fields_of_job
from octet.service.store.ids import new_id

START_PHASES: tuple[StartPhase, ...] = get_args(StartPhase)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """The end of an attempt. `reason` is set exactly if it failed."""

    event: AttemptEvent
    reason: FailureReason | None = None
    message: str | None = None
    summary: JobSummary | None = None


def reserve(
    session: Session,
    job: JobRow,
    now: datetime,
    workers: int | None = None,
    free: int | None = None,
    *,
    is_lent: bool = False,
) -> AttemptRow:
    """Give a queued job its slots: create its next attempt. Nothing is started yet.

    workers: ranks of the attempt; by default the job's most. free: slots that the pool had for it. is_lent: it gives its slots
    back when the job ahead of it can use them.
    """
    workers = job.workers if workers is None else workers
    former = session.get(AttemptRow, job.current_attempt_id) if job.min_workers is not None and job.current_attempt_id else None
    job.state = next_job_state(job.state, JobEvent.PLACE)
    job.num_attempts += 1
    attempt = AttemptRow(
        id=new_id("att", now),
        job_id=job.id,
        epoch=job.num_attempts,
        state=AttemptState.RESERVED,
        pool=job.pool,
        workers=workers,
        created_at=now,
        num_log_lines=0,
        num_events=0,
        is_lent=is_lent,
    )
    session.add(attempt)
    job.current_attempt_id = attempt.id
    job.not_before = None
    message = f"attempt {attempt.epoch} has {workers} slot{'s' * (workers > 1)} of pool {job.pool!r}"
    if workers < job.workers:
        message += f", of {job.min_workers} to {job.workers}: {free} were free"
    if is_lent:
        message += "; they are lent, until the job ahead of it can use them"
    store.jobs.add_event(session, job, now, "job.placed", message, attempt_id=attempt.id)
    before = former.workers if former is not None else workers
    if before != workers:
        message = f"goes on with {workers} ranks after {before}, at the same global batch: {free} slots were free"
        data: dict[str, JsonScalar] = {"workers": workers, "former_workers": before}
        store.jobs.add_event(session, job, now, "job.resized", message, attempt_id=attempt.id, data=data)
    return attempt


def log_fields_of(job: JobRow) -> dict[str, str]:
    """Return what log lines about a job say besides their words."""
    return fields_of_job(job.id, job.current_attempt_id, job.traceparent)


def launched(session: Session, job: JobRow, attempt: AttemptRow, now: datetime) -> None:
    """Note that the cluster has the attempt: the launch returned, or a rank reported before that."""
    was = attempt.state
    attempt.state = next_attempt_state(was, AttemptEvent.LAUNCHED)
    if was is AttemptState.LAUNCHING:
        attempt.launched_at = now
        store.jobs.add_event(
            session, job, now, "attempt.launched", f"attempt {attempt.epoch} is on the cluster", attempt_id=attempt.id
        )


def heard(session: Session, job: JobRow, attempt: AttemptRow, now: datetime) -> None:
    """Note that a rank reported, which may be before the call that launched it returns."""
    if attempt.state is AttemptState.LAUNCHING:
        launched(session, job, attempt, now)


def started(
    session: Session,
    job: JobRow,
    attempt: AttemptRow,
    now: datetime,
    resumed_from_step: int,
    facts: dict[str, JsonScalar] | None = None,
) -> None:
    """Note that the attempt trains, and with it the job. facts: what the event says of the model."""
    attempt.state = next_attempt_state(attempt.state, AttemptEvent.STARTED)
    attempt.resumed_from_step = resumed_from_step
    job.state = next_job_state(job.state, JobEvent.START)
    job.started_at = job.started_at or now
    where = f"after step {resumed_from_step}" if resumed_from_step else "from the beginning"
    message = f"attempt {attempt.epoch} trains {where} on {attempt.node} ({attempt.device})"
    store.jobs.add_event(session, job, now, "attempt.started", message, attempt_id=attempt.id, data=facts)
    logger.info("job %s (%s) started: %s", job.id, job.name, message, extra=log_fields_of(job))


def finish(session: Session, job: JobRow, attempt: AttemptRow, ending: Ending, now: datetime) -> None:
    """End an attempt, and end its job or put the job back into the queue."""
    attempt.state = next_attempt_state(attempt.state, ending.event)
    is_yielding = job.desired is DesiredState.YIELD
    if is_yielding:
        job.desired, job.stop_requested_at = DesiredState.RUN, None
    attempt.finished_at = now
    attempt.reason = ending.reason
    attempt.message = ending.message
    if attempt.token_hash is None:
        attempt.released_at = now  # nothing was ever launched, so nothing has to be stopped
    because = f": {ending.reason.value}" if ending.reason else ""
    store.jobs.add_event(
        session,
        job,
        now,
        f"attempt.{attempt.state.value}",
        f"attempt {attempt.epoch} {attempt.state.value}{because}{f' ({ending.message})' if ending.message else ''}"[:4096],
        attempt_id=attempt.id,
        data={"reason": ending.reason.value} if ending.reason else None,
    )
    if ending.event is AttemptEvent.SUCCEED:
        job.reason = job.message = None  # it ended before it stopped at a limit
        job.summary = ending.summary.model_dump(mode="json") if ending.summary else None
        job.measured_to_planned, job.step_time_to_planned = _measured_to_planned(job, attempt, ending.summary)
        _end_job(session, job, JobEvent.SUCCEED, now)
    elif ending.event is AttemptEvent.CANCEL and is_yielding:
        _requeue(session, job, now, "made way")
    elif ending.event is AttemptEvent.CANCEL and job.state is JobState.PAUSING:
        hold(session, job, JobEvent.STOP, now)
    elif ending.event is AttemptEvent.CANCEL:
        _end_job(session, job, JobEvent.STOP, now)
    elif ending.event is AttemptEvent.YIELD:
        job.state, job.queued_at = next_job_state(job.state, JobEvent.REQUEUE), now
        store.jobs.add_event(session, job, now, "job.queued", ending.message or "", attempt_id=attempt.id)
    else:
        _fail(session, job, attempt, ending, now)


def make_way(session: Session, job: JobRow, now: datetime, why: str) -> None:
    """Have a job's attempt save a checkpoint and end; the job then waits in the queue. It counts as no failure."""
    job.desired, job.stop_requested_at = DesiredState.YIELD, now
    message = f"asked to make way after a checkpoint: {why}"
    store.jobs.add_event(session, job, now, "job.yielding", message, attempt_id=job.current_attempt_id)


def _requeue(session: Session, job: JobRow, now: datetime, words: str) -> None:
    """Put a job whose attempt ended without a failure of its own back into the queue, at the place of its age and priority."""
    job.state, job.queued_at = next_job_state(job.state, JobEvent.REQUEUE), now
    job.remaining_s = None
    goes_on, data = _next_start(session, job)
    store.jobs.add_event(session, job, now, "job.queued", f"{words}; it goes on {goes_on}", data=data)
    logger.info("job %s (%s) %s; it goes on %s", job.id, job.name, words, goes_on, extra=log_fields_of(job))


def _measured_to_planned(job: JobRow, attempt: AttemptRow, summary: JobSummary | None) -> tuple[float | None, float | None]:
    """Compare bytes and a step's time of the rank that reports with those that were planned, for as many ranks.

    The plan is of the rank that holds most, so jobs with a pipeline have neither. A job without a plan, or that went on at
    another level than its plan's, is compared with the states in closed form.
    """
    if summary is None:
        return None, None
    spec = JobSpec.read_stored(job.spec)
    if spec.layout.pipeline > 1 or attempt.workers != spec.resources.workers:
        return None, None
    plan = None if job.plan is None else JobPlan.read_stored(job.plan)
    if plan is not None and plan.level == job.level:
        return plan.ratio(summary.peak_memory_bytes, summary.memory_bytes), plan.step_ratio(summary.step_time_s)
    if summary.peak_memory_bytes is not None:
        return None, None
    try:
        planned = states_of(spec, spec.model.sizes).held
    except NotPlanned:
        return None, None
    return quotient(sum(summary.memory_bytes.values()), sum(planned.values())), None


def refuse(session: Session, job: JobRow, reason: FailureReason, message: str, now: datetime) -> None:
    """End a queued job that cannot be placed."""
    job.reason, job.message = reason, message
    _end_job(session, job, JobEvent.FAIL, now, message)


def end_waiting(session: Session, job: JobRow, now: datetime) -> None:
    """Cancel a job that has no live attempt."""
    _end_job(session, job, JobEvent.CANCEL, now)


def hold(session: Session, job: JobRow, event: JobEvent, now: datetime) -> None:
    """Pause a job that has no live attempt any more, or had none. It keeps no slots and waits until it is resumed."""
    job.state = next_job_state(job.state, event)
    job.not_before = None
    job.remaining_s = None
    goes_on, data = _next_start(session, job)
    store.jobs.add_event(session, job, now, "job.paused", f"the job is paused; it will go on {goes_on}", data=data)
    logger.info("job %s (%s) is paused; it will go on %s", job.id, job.name, goes_on, extra=log_fields_of(job))


def revive(session: Session, job: JobRow, event: JobEvent, now: datetime) -> None:
    """Put a job that is over back into the queue, with the whole budgets for failures, for another attempt.

    Its attempts, events, logs and checkpoints stay; for an export also its summary, by which `_end_job` knows that it has
    succeeded.
    """
    job.state, job.desired = next_job_state(job.state, event), DesiredState.RUN
    job.queued_at = now
    job.finished_at = job.stop_requested_at = job.not_before = None
    job.reason = job.message = None
    if event is not JobEvent.EXPORT:
        job.summary = job.measured_to_planned = job.step_time_to_planned = None
        store.comparisons.forget_outcome(session, job.id)
    if job.num_attempts == 0:
        job.plan = None  # it may have been refused: it is planned again, for what the pool has by now
    job.num_failures = job.num_platform_failures = 0
    job.failures = None
    goes_on, data = _next_start(session, job)
    words = {JobEvent.EXTEND: "continued", JobEvent.EXPORT: "to be exported"}
    message = f"{words.get(event, 'retried')}; it goes on {goes_on}"
    if event is JobEvent.EXTEND:
        message += f", to step {job.num_steps}"
        data["steps"] = job.num_steps
    store.jobs.add_event(session, job, now, "job.queued", message, data=data)
    logger.info("job %s (%s) is %s", job.id, job.name, message, extra=log_fields_of(job))


def _next_start(session: Session, job: JobRow) -> tuple[str, dict[str, JsonScalar]]:
    """Say where the job's next attempt goes on, and give the step of the checkpoint."""
    newest = next(iter(store.records.newest_checkpoints(session, job.id, 1)), None)
    if newest is None:
        return "at the beginning: it has no checkpoint", {"checkpoint_step": None}
    return f"after step {newest.step}, from its checkpoint", {"checkpoint_step": newest.step}


def _fail(session: Session, job: JobRow, attempt: AttemptRow, ending: Ending, now: datetime) -> None:
    assert ending.reason is not None, "a failure has a reason"
    if job.state is not JobState.CANCELLING and ending.reason.calls_for_precision and _climb(session, job, ending.reason, now):
        return
    if job.state is JobState.CANCELLING:
        _end_job(session, job, JobEvent.FAIL, now)
        return
    verdict = _count_and_judge(session, job, attempt, ending.reason)
    if verdict.wait_s is None:
        job.reason = ending.reason
        memory = _states_by_level(job) if ending.reason is FailureReason.OUT_OF_MEMORY else None
        job.message = "; ".join(part for part in (verdict.why, memory, ending.message) if part) or None
        _end_job(session, job, JobEvent.FAIL, now, verdict.why)
    elif job.state is JobState.PAUSING:
        hold(session, job, JobEvent.REQUEUE, now)
    else:
        job.state = next_job_state(job.state, JobEvent.REQUEUE)
        job.queued_at = now
        job.not_before = now + timedelta(seconds=verdict.wait_s)
        number = job.num_failures + job.num_platform_failures
        message = f"tried again in {verdict.wait_s:.2g} s, after failure {number} ({ending.reason.value})"
        if ending.reason is FailureReason.STORAGE_FULL:
            message = f"tried again once there is space, in {verdict.wait_s:.2g} s at the earliest. {ending.reason.hint}"
        store.jobs.add_event(session, job, now, "job.queued", message)


def _states_by_level(job: JobRow) -> str | None:
    """Say what a rank's states take at the job's level, and at the most precise one with a fifth less; None if nobody can."""
    plan = None if job.plan is None else JobPlan.read_stored(job.plan)
    taken: dict[str, float] = {}
    for level in dict.fromkeys((job.level, *AUTOMATIC)):
        with suppress(ValueError):  # a level that the job cannot have, or states that only a rank can count
            spec = JobSpec.model_validate(merge_patch(job.spec, {"precision": {"level": level}}))
            taken[level] = sum(states_of(spec, spec.model.sizes).held.values()) / 1e9
    if job.level not in taken:
        return None
    device = f" of {plan.memory_per_device_bytes / 1e9:.3g} GB" if plan is not None else ""
    words = f"weights, gradients and optimizer states alone take {taken[job.level]:.3g} GB{device} at {job.level}"
    less = next((level for level in AUTOMATIC if taken.get(level, inf) < 0.8 * taken[job.level]), None)
    return words if less is None else f"{words} and {taken[less]:.3g} GB at {less}"


def _climb(session: Session, job: JobRow, reason: FailureReason, now: datetime) -> bool:
    """Let a job go on at the next level of its ladder, which counts as no failure. Returns False if it has none."""
    spec = JobSpec.read_stored(job.spec)
    if not spec.precision.ladder:
        return False
    former = job.level
    put_level(job, spec.next_rung)
    message = f"goes on at level {job.level}, the next of its ladder after {former}: {reason.value}"
    data: dict[str, JsonScalar] = {"level": job.level, "former_level": former, "reason": reason.value}
    store.jobs.add_event(session, job, now, "job.climbed", message, data=data)
    if job.state is JobState.PAUSING:
        hold(session, job, JobEvent.REQUEUE, now)
    else:
        _requeue(session, job, now, f"goes on at level {job.level}")
    return True


def _count_and_judge(session: Session, job: JobRow, attempt: AttemptRow, reason: FailureReason) -> retries.Verdict:
    """Count a failure, and decide if the job is tried again."""
    counts = retries.counts_of(job.failures)
    counts[reason] = counts.get(reason, 0) + 1
    job.failures = {each.value: count for each, count in counts.items()}
    latest = [retries.FailedAttempt(reason, attempt.resumed_from_step, attempt.last_step)]
    if reason.blame is Blame.JOB:
        job.num_failures += 1
        session.flush()  # this attempt is the newest
        rows = store.jobs.newest_failures(session, job.id, reason.blame, retries.CRASH_LOOP)
        latest = [retries.FailedAttempt(*row) for row in rows]
    else:
        job.num_platform_failures += 1
    # Drawn from the id, so that whoever decides again decides the same.
    draw = (zlib.crc32(attempt.id.encode()) & 0xFFFF) / 0xFFFF
    return retries.judge(JobSpec.read_stored(job.spec).retry, counts, latest, draw)


def _end_job(session: Session, job: JobRow, event: JobEvent, now: datetime, why: str = "") -> None:
    """End a job. why: what no event of an attempt says."""
    if job.summary is not None and event is not JobEvent.SUCCEED:  # it had succeeded before it was to be exported
        why = "it was cancelled" if job.reason is None else f"{job.reason.value} ({job.message}). {job.reason.hint}"
        message = f"the export that was asked for was not made: {why}"
        store.jobs.add_event(session, job, now, "export.failed", message[:4096], attempt_id=job.current_attempt_id)
        job.reason = job.message = None
        event = JobEvent.KEEP
    job.state = next_job_state(job.state, event)
    job.finished_at = now
    job.not_before = None
    job.remaining_s = None
    because = f": {job.reason.value}{f': {why}'.rstrip('.: ')}. {job.reason.hint}" if job.reason else ""
    store.jobs.add_event(session, job, now, f"job.{job.state.value}", f"the job {_WORDS[job.state]}{because}"[:4096])
    logger.info("job %s (%s) ended: it %s%s", job.id, job.name, _WORDS[job.state], because, extra=log_fields_of(job))


_WORDS = {JobState.SUCCEEDED: "succeeded", JobState.FAILED: "failed", JobState.CANCELLED: "was cancelled"}
