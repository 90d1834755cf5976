"""What nobody else tidies up: old idempotency keys, and processes that no attempt of ours accounts for."""

import logging

from api_schemas import AttemptRef
from service.cluster.launcher import LauncherError
from service.dispatcher.clean import STOP_GRACE_S
from service.dispatcher.work import Work
from service.jobs import store, store_queue

logger = logging.getLogger(__name__)


def step(work: Work) -> None:
    with work.write() as (session, now):
        store.forget_idempotency_keys(session, now)
    try:
        found = work.launcher.list()
        # Read after the cluster was asked: an attempt is in the database before it is on the cluster.
        with work.database.read() as session:
            ours = store_queue.unreleased_among(session, [ref.attempt_id for ref in found])
        work.each(lambda ref: _stop(work, ref), [ref for ref in found if ref.attempt_id not in ours])
    except LauncherError as error:
        logger.warning("the cluster was not searched for orphans: %s", error)


def _stop(work: Work, ref: AttemptRef) -> None:
    logger.warning("attempt %s has processes and should have none; they are ended", ref.attempt_id)
    work.launcher.stop(ref, STOP_GRACE_S)
