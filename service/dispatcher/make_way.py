"""Have attempts make way: they save a checkpoint and end, so that others can use their slots.

Loops do so for the job ahead in the queue, for a larger attempt of the same job, at a limit of the job and at its tenant's slot
hours of the month; and a server that stops does so with every attempt.
"""

from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from octet.api_schemas import AttemptState, DesiredState
from octet.service import store
from octet.service.dispatcher.context import DispatcherContext
from octet.service.dispatcher.place import decisions
from octet.service.jobs import attempts, commands
from octet.service.jobs.attempts import Ending
from octet.service.jobs.lifecycle import AttemptEvent
from octet.service.jobs.limits import Reached, reached
from octet.service.scheduling.decide import is_worth_growing, most_of
from octet.service.scheduling.pools import pools_with_hours, read_pools
from octet.service.scheduling.quotas import hours_reason
from octet.service.store.queue import ShrunkAttempt

PREEMPTED = "a job of a higher priority needs its slots"
FRESH = timedelta(seconds=5)
"""A checkpoint is as old at most when its attempt ends for a larger one."""


def drain(context: DispatcherContext) -> int:
    """Ask the attempts that nobody stops yet to make way for the end of the server. Return how many have not ended."""
    with context.database.read() as session:
        live = store.queue.live_attempts(session)
    for ref, _ in live:
        _ask(context, ref.attempt_id, "the server stops")
    return len(live)


def reclaim(context: DispatcherContext) -> None:
    """Take slots back once the job ahead fits with them: lent ones, and in pools that preempt those of less urgent jobs.

    A loan ends by itself when no job waits ahead any more: the attempt keeps its slots then, as any other.
    """
    with context.database.read() as session:
        lent = {loan.pool for loan in store.queue.loans(session)}
        if not lent and not any(pool.preempts for pool in context.settings.pools):
            return
        decided = decisions(context, session, context.database.now(session))
    for pool in lent - {each.pool for each in decided if each.holds_back}:
        with context.write() as (session, _):
            store.queue.end_loans(session, pool)
    for loan in (loan for each in decided for loan in each.reclaims):
        why = "the job ahead of it can use the slots that it was lent" if loan.priority is None else PREEMPTED
        if _ask(context, loan.attempt_id, why):
            context.wake()


def _ask(context: DispatcherContext, attempt_id: str, why: str) -> bool:
    """Ask an attempt to make way. Returns False if it is over or was asked for something else meanwhile."""
    with context.write() as (session, now):
        locked = store.jobs.lock_attempt(session, attempt_id)
        if locked is None or locked[1].state.is_terminal or locked[0].desired is not DesiredState.RUN:
            return False
        attempts.make_way(session, locked[0], now, why)
    return True


def grow(context: DispatcherContext) -> None:
    """End an attempt with fewer ranks than its job may have after a checkpoint, so that a larger one goes on.

    Nobody waits in the pool's queue then, the slots have been free for `elastic_grow_after_s`, and the job is done sooner
    though it starts again. The attempt is ended right after its checkpoint was reported, so that few steps are taken twice; it
    counts as no failure.
    """
    with context.database.read() as session:
        shrunk = store.queue.shrunk_attempts(session)
        larger = _larger(context, session, shrunk) if shrunk else {}
        now = context.database.now(session)
    since = {attempt_id: context.room_since.get(attempt_id, now) for attempt_id in larger}
    context.room_since = since
    long_enough = timedelta(seconds=context.settings.elastic_grow_after_s)
    for attempt in shrunk:
        attempt_id, written_at = attempt.ref.attempt_id, attempt.checkpoint_at
        if attempt_id in larger and now >= since[attempt_id] + long_enough and written_at and now <= written_at + FRESH:
            _yield(context, attempt, larger[attempt_id], now)


def _larger(context: DispatcherContext, session: Session, shrunk: list[ShrunkAttempt]) -> dict[str, int]:
    """The number of ranks that an attempt of each pool could grow to, by id: the oldest of a pool, while nobody waits there."""
    now = context.database.now(session)
    free = {pool.name: pool.slots_free for pool in read_pools(session, context.settings, now)}
    found: dict[str, int] = {}
    for attempt in shrunk:
        if free.get(attempt.pool, 0) > 0 and not store.queue.head_of_queue(session, attempt.pool):
            workers = most_of(attempt.worker_counts, free.pop(attempt.pool) + attempt.workers)
            if workers is not None and workers > attempt.workers and _is_worth_it(attempt, workers):
                found[attempt.ref.attempt_id] = workers
    return found


def _is_worth_it(attempt: ShrunkAttempt, larger: int) -> bool:
    return is_worth_growing(attempt.workers, larger, attempt.remaining_s, attempt.start_s)


def _yield(context: DispatcherContext, shrunk: ShrunkAttempt, workers: int, now: datetime) -> None:
    with context.write() as (session, now):
        locked = store.jobs.lock_attempt(session, shrunk.ref.attempt_id)
        if locked is None or locked[1].state is not AttemptState.RUNNING or locked[0].desired is not DesiredState.RUN:
            return
        job, attempt = locked
        message = (
            f"makes way after a checkpoint for an attempt with {workers} ranks in place of {attempt.workers}: slots are free"
        )
        attempts.finish(session, job, attempt, Ending(AttemptEvent.YIELD, message=message), now)
    context.wake()


def limit(context: DispatcherContext) -> None:
    """Stop jobs that have taken as much as they may: they save a checkpoint, and are cancelled."""
    with context.database.read() as session:
        limited = store.queue.limited_jobs(session, context.database.now(session))
    prices = context.settings.slot_hour_prices
    for job in limited:
        if (reached_one := reached(job.limits, job.taken, prices.get(job.pool))) is not None:
            _stop(context, job.job_id, reached_one)
    if limiting := pools_with_hours(context.settings.pools):
        _end_at_quota(context, limiting)


def _end_at_quota(context: DispatcherContext, limiting: list[str]) -> None:
    """Have the attempts of tenants make way that have taken all slot hours of the month. Their jobs wait for the next one."""
    with context.database.read() as session:
        now = context.database.now(session)
        hours = store.use.hours_of_month(session, limiting, now)
        over = [
            (attempt_id, why)
            for pool in context.settings.pools
            for tenant, taken in hours.get(pool.name, {}).items()
            if (why := hours_reason(tenant, pool.name, taken, pool.of_tenant(tenant).slot_hours_per_month, now)) is not None
            for attempt_id in store.use.running_attempts(session, pool.name, tenant)
        ]
    for attempt_id, why in over:
        if _ask(context, attempt_id, why):
            context.wake()


def _stop(context: DispatcherContext, job_id: str, limit: Reached) -> None:
    with context.write() as (session, now):
        job = store.jobs.lock_job(session, job_id)
        if job is not None and not job.state.is_terminal:
            commands.reach_limit(session, job, limit, now)
    context.wake()
