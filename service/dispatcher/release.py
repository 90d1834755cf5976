"""Releases attempts that are over: makes sure that their processes are gone, then frees their slots."""

import logging

from octet.api_schemas import AttemptRef
from octet.service import store
from octet.service.cluster.launcher import LauncherError
from octet.service.dispatcher.context import DispatcherContext

STOP_GRACE_S = 5.0

logger = logging.getLogger(__name__)


def step(context: DispatcherContext) -> None:
    with context.database.read() as session:
        rows = store.queue.attempts_to_release(session, context.database.now(session))
        refs = [AttemptRef(attempt_id=row.id, epoch=row.epoch) for row in rows]
    context.each(lambda ref: _release(context, ref), refs)


def _release(context: DispatcherContext, ref: AttemptRef) -> None:
    try:
        context.launcher.stop(ref, STOP_GRACE_S)
    except LauncherError as error:
        words = "attempt %s keeps its slots until it is known to be gone: %s"
        logger.warning(words, ref.attempt_id, error, extra={"attempt_id": ref.attempt_id})
        return
    with context.write() as (session, now):
        locked = store.jobs.lock_attempt(session, ref.attempt_id)
        assert locked is not None, "a job is deleted once its attempts are released"
        locked[1].released_at = locked[1].released_at or now
    context.wake()
