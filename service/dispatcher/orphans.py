"""Ends orphans: processes on the cluster without an attempt that may have them. Deletes old idempotency keys and
gathers tallies, too."""

import logging

from octet.api_schemas import AttemptRef
from octet.service import store
from octet.service.cluster.launcher import LauncherError
from octet.service.dispatcher.context import DispatcherContext
from octet.service.dispatcher.release import STOP_GRACE_S

logger = logging.getLogger(__name__)


def step(context: DispatcherContext) -> None:
    with context.write() as (session, now):
        store.jobs.forget_idempotency_keys(session, now)
        store.tallies.gather(session)
    try:
        found = context.launcher.list()
        # This order matters: an attempt is in the database before it is on the cluster.
        with context.database.read() as session:
            ours = store.queue.unreleased_among(session, [ref.attempt_id for ref in found])
        context.each(lambda ref: _stop(context, ref), [ref for ref in found if ref.attempt_id not in ours])
    except LauncherError as error:
        logger.warning("the cluster was not searched for orphans: %s", error)


def _stop(context: DispatcherContext, ref: AttemptRef) -> None:
    logger.warning("attempt %s has processes and should have none; ending them", ref.attempt_id)
    context.launcher.stop(ref, STOP_GRACE_S)
