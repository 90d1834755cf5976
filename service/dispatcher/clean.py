"""Attempts that are over: make sure that their processes are gone, then give their slots back."""

import logging

from api_schemas import AttemptRef
from service.cluster.launcher import LauncherError
from service.dispatcher.work import Work
from service.jobs import store, store_queue

STOP_GRACE_S = 5.0

logger = logging.getLogger(__name__)


def step(work: Work) -> None:
    with work.database.read() as session:
        rows = store_queue.attempts_to_release(session, work.database.now(session))
        refs = [AttemptRef(attempt_id=row.id, epoch=row.epoch) for row in rows]
    work.each(lambda ref: _release(work, ref), refs)


def _release(work: Work, ref: AttemptRef) -> None:
    try:
        work.launcher.stop(ref, STOP_GRACE_S)
    except LauncherError as error:
        logger.warning("attempt %s keeps its slots until it is known to be gone: %s", ref.attempt_id, error)
        return
    with work.write() as (session, now):
        locked = store.lock_attempt(session, ref.attempt_id)
        assert locked is not None
        locked[1].released_at = locked[1].released_at or now
    work.wake()
