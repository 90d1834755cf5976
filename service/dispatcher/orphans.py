"""Ends orphans: processes on the cluster without an attempt that may have them.

It also deletes the folders of deleted jobs, the files of checkpoints that their jobs do not keep, and old idempotency keys,
and gathers tallies.
"""

import logging
import shutil
from datetime import timedelta

from octet.api_schemas import AttemptRef
from octet.service import store
from octet.service.cluster.launcher import LauncherError
from octet.service.dispatcher.context import DispatcherContext
from octet.service.dispatcher.release import STOP_GRACE_S

LATELY, MOST_JOBS = timedelta(hours=1), 1000

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
    _delete_jobs(context)
    _delete_checkpoints(context)


def _delete_jobs(context: DispatcherContext) -> None:
    """Delete the folders of deleted jobs. A job is forgotten only after that, so a dispatcher that dies leaves no folder."""
    with context.database.read() as session:
        deleted = store.jobs.deleted_jobs(session, MOST_JOBS)
    gone = []
    for job_id in deleted:
        folder = context.settings.job_dir(job_id)
        try:
            if folder.exists():
                shutil.rmtree(folder)
            gone.append(job_id)
        except OSError as error:
            logger.warning("the folder of the deleted job %s stays until it can be deleted: %s", job_id, error)
        context.health.progressed()
    if gone:
        with context.write() as (session, _):
            store.jobs.forget_deleted(session, gone)


def _delete_checkpoints(context: DispatcherContext) -> None:
    """Delete the folders of checkpoints that are not registered any more, of jobs that live or ended lately.

    A folder goes only if it is older than the newest registered checkpoint, by step and by time: a newer one may not have
    been reported yet, or belong to an attempt that trains its steps again.
    """
    with context.database.read() as session:
        since = context.database.now(session) - LATELY
        jobs = [job_id for job_id, _ in store.jobs.jobs_to_show(session, since, MOST_JOBS)]
        registered = store.records.checkpoint_names(session, jobs)
    for job_id, names in registered.items():
        newest, completed_at = list(names.items())[-1]
        for folder in (context.settings.job_dir(job_id) / "checkpoints").glob("step_*"):
            is_older = folder.name < newest and folder.stat().st_mtime < completed_at.timestamp()
            if is_older and folder.name not in names:
                logger.info("job %s does not keep checkpoint %s; its files are deleted", job_id, folder.name)
                shutil.rmtree(folder, ignore_errors=True)


def _stop(context: DispatcherContext, ref: AttemptRef) -> None:
    logger.warning("attempt %s has processes and should have none; ending them", ref.attempt_id)
    context.launcher.stop(ref, STOP_GRACE_S)
