"""Ends orphans: processes on the cluster without an attempt that may have them.

It also deletes the folders of deleted jobs, the files of checkpoints and exports that were deleted or that their jobs do not
keep, and old idempotency keys, and gathers tallies. Where a tenant's storage is full it deletes what its retention allows.
"""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from octet.api_schemas import AttemptRef
from octet.api_schemas.quotas import TenantQuota
from octet.service import store
from octet.service.cluster.launcher import LauncherError
from octet.service.db.tables import CheckpointRow, ExportRow
from octet.service.dispatcher.context import DispatcherContext
from octet.service.dispatcher.release import STOP_GRACE_S
from octet.service.errors import ServiceError
from octet.service.jobs import commands
from octet.service.jobs.job_folders import delete_folder, opened_folder
from octet.service.scheduling.quotas import to_collect

LATELY, MOST_JOBS, MOST_FILES = timedelta(hours=1), 1000, 1000

logger = logging.getLogger(__name__)


def step(context: DispatcherContext) -> None:
    with context.write() as (session, now):
        store.jobs.forget_idempotency_keys(session, now)
        store.tallies.gather(session)
        store.use.forget_deleted(session, now)
    try:
        _end_orphans(context)
    except LauncherError as error:
        logger.warning("orphans may run on, and the folders of deleted jobs stay: %s", error)
    else:
        _delete_jobs(context)  # no process is left that could write into them again
        _delete_files(context)
    for table in (CheckpointRow, ExportRow):
        _delete_surplus(context, table)
    for tenant, quota in context.settings.quotas.tenants.items():
        _collect(context, tenant, quota)


def _end_orphans(context: DispatcherContext) -> None:
    """End all orphans. Raises LauncherError if the cluster does not list its attempts, or does not end one."""
    found = context.launcher.list()
    # This order matters: an attempt is in the database before it is on the cluster.
    with context.database.read() as session:
        ours = store.queue.unreleased_among(session, [ref.attempt_id for ref in found])
    context.each(lambda ref: _stop(context, ref), [ref for ref in found if ref.attempt_id not in ours])


def _delete_jobs(context: DispatcherContext) -> None:
    """Delete the folders of deleted jobs. A job is forgotten only after that, so a dispatcher that dies leaves no folder."""
    with context.database.read() as session:
        deleted = store.jobs.deleted_jobs(session, MOST_JOBS)
    folder_of = context.settings.job_dir
    gone = [id_ for id_ in deleted if _delete_folder(context, f"the folder of the deleted job {id_}", folder_of(id_))]
    if gone:
        with context.write() as (session, _):
            store.jobs.forget_deleted(session, gone)


def _delete_files(context: DispatcherContext) -> None:
    """Delete the folders of deleted checkpoints and exports. No attempt of their jobs begins before they are forgotten."""
    with context.database.read() as session:
        deleted = store.records.deleted_files(session, MOST_JOBS)
        session.expunge_all()
    gone = [
        row
        for row in deleted
        if _delete_folder(
            context, f"the deleted {row.name} of job {row.job_id}", context.settings.job_dir(row.job_id), row.kind, row.name
        )
    ]
    if gone:
        with context.write() as (session, _):
            store.records.forget_deleted_files(session, gone)


def _delete_folder(context: DispatcherContext, what: str, job_dir: Path, *names: str) -> bool:
    """Delete a folder of a job. Returns False, with a line in the log, if it stays."""
    try:
        delete_folder(job_dir, *names)
    except OSError as error:
        logger.warning("%s stays until it can be deleted: %s", what, error)
        return False
    finally:
        context.health.progressed()
    return True


def _collect(context: DispatcherContext, tenant: str, quota: TenantQuota) -> None:
    """Delete what jobs saved that are over for longer than a full tenant's retention, as if the tenant had done so.

    A job that lives keeps all; so does one whose attempt is being stopped.
    """
    if quota.retention_days is None:
        return
    with context.database.read() as session:
        before = context.database.now(session) - timedelta(days=quota.retention_days)
        used = store.use.storage_of(session, [tenant])[tenant]
        is_full = used >= quota.storage_bytes
        chosen = to_collect(store.use.kept_since(session, tenant, before, MOST_FILES), used, quota) if is_full else []
    why = f"its job is over for {quota.retention_days:g} days and the storage of tenant {tenant!r} is full"
    for each in chosen:
        with context.write() as (session, now), suppress(ServiceError):
            commands.delete_saved(session, each.table, each.job_id, each.name, now, why=why)
        context.health.progressed()
    if chosen:
        context.wake()


def _delete_surplus(context: DispatcherContext, table: type[CheckpointRow | ExportRow]) -> None:
    """Delete the folders of checkpoints or exports that are not registered any more, of jobs that live or ended lately.

    A folder that cannot be deleted, or that a worker replaces meanwhile, keeps no other job from losing its own.
    """
    with context.database.read() as session:
        since = context.database.now(session) - LATELY
        jobs = [job_id for job_id, _ in store.jobs.jobs_to_show(session, since, MOST_JOBS)]
        registered = store.records.names_of(session, table, jobs)
    for job_id, names in registered.items():
        try:
            for name in _delete_unregistered(context.settings.job_dir(job_id), table.__tablename__, names):
                words = "job %s does not keep %s/%s; its files are deleted"
                logger.info(words, job_id, table.__tablename__, name, extra={"job_id": job_id})
        except OSError as error:
            words = "one of the %s that job %s does not keep stays until it can be deleted: %s"
            logger.warning(words, table.__tablename__, job_id, error, extra={"job_id": job_id})
        context.health.progressed()


def _delete_unregistered(job_dir: Path, kind: str, registered: Mapping[str, datetime]) -> Iterator[str]:
    """Delete the checkpoints, or exports, of a job that are not registered. Yields the name of each. Raises OSError.

    One goes only if it is older than the newest registered one, by step and by time: a newer one may not have
    been reported yet, or belong to an attempt that trains its steps again.
    """
    newest, completed_at = list(registered.items())[-1]
    try:
        with opened_folder(job_dir, kind) as folder:
            for name in sorted(name for name in os.listdir(folder) if name.startswith("step_")):
                modified_s = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
                if name < newest and modified_s < completed_at.timestamp() and name not in registered:
                    shutil.rmtree(name, dir_fd=folder)
                    yield name
    except FileNotFoundError:
        return  # nothing was written, or a worker replaces one now


def _stop(context: DispatcherContext, ref: AttemptRef) -> None:
    words = "attempt %s has processes and should have none; ending them"
    logger.warning(words, ref.attempt_id, extra={"attempt_id": ref.attempt_id})
    context.launcher.stop(ref, STOP_GRACE_S)
