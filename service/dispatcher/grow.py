"""Grows elastic jobs: an attempt with fewer ranks than its job may have ends after a checkpoint, and a larger one goes on.

Nobody waits in the pool's queue then, and the slots have been free for `elastic_grow_after_s`. The attempt is ended right after
its checkpoint was reported, so that few steps are taken twice; it counts as no failure.
"""

from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from octet.api_schemas import AttemptState, DesiredState
from octet.service import store
from octet.service.dispatcher.context import DispatcherContext
from octet.service.jobs import attempts
from octet.service.jobs.attempts import Ending
from octet.service.jobs.lifecycle import AttemptEvent
from octet.service.scheduling.decide import most_of
from octet.service.scheduling.pools import read_pools
from octet.service.store.queue import ShrunkAttempt

FRESH = timedelta(seconds=5)
"""A checkpoint is as old at most when its attempt ends."""


def step(context: DispatcherContext) -> None:
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
    free = {pool.name: pool.slots_free for pool in read_pools(session, context.settings.pools)}
    found: dict[str, int] = {}
    for attempt in shrunk:
        if free.get(attempt.pool, 0) > 0 and not store.queue.head_of_queue(session, attempt.pool):
            workers = most_of(attempt.worker_counts, free.pop(attempt.pool) + attempt.workers)
            if workers is not None and workers > attempt.workers:
                found[attempt.ref.attempt_id] = workers
    return found


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
