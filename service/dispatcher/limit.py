"""Stops jobs that have taken as many slot hours as they may: they save a checkpoint, and are cancelled."""

from octet.service import store
from octet.service.dispatcher.context import DispatcherContext
from octet.service.jobs import commands
from octet.service.store.queue import Limited


def step(context: DispatcherContext) -> None:
    with context.database.read() as session:
        limited = store.queue.limited_jobs(session, context.database.now(session))
    for job in limited:
        if job.slot_hours >= job.max_slot_hours:
            _stop(context, job)


def _stop(context: DispatcherContext, limited: Limited) -> None:
    with context.write() as (session, now):
        job = store.jobs.lock_job(session, limited.job_id)
        if job is not None and not job.state.is_terminal:
            commands.reach_limit(session, job, limited, now)
    context.wake()
