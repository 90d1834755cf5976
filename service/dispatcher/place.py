"""Places jobs: queued → starting. It asks the cluster for its slots first, then decides and writes in one transaction.

A pass that would change nothing writes nothing: while jobs wait, the decision is taken on a read alone.
"""

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy.orm import Session

from octet.api_schemas import JobState
from octet.service import store
from octet.service.cluster.launcher import LauncherError
from octet.service.dispatcher.context import DispatcherContext
from octet.service.jobs import attempts
from octet.service.scheduling.decide import Decision, decide, pool_states
from octet.service.scheduling.space import space_for


def step(context: DispatcherContext) -> None:
    try:
        present = {pool.pool: pool.slots_present for pool in context.launcher.capacity()}
    except LauncherError as error:
        context.outage.begins(error)
        return
    context.outage.ends()
    with context.database.read() as session:
        is_known = store.queue.slots_present(session) == present
        if is_known and not _to_start(context, session, present, context.database.now(session)):
            return
    with context.write() as (session, now):
        if store.queue.slots_present(session) != present:
            store.queue.set_slots_present(session, present, now)
        starting = _to_start(context, session, present, now)
        # In the order in which comparisons and reports lock jobs, too: any other could lock two transactions in each other.
        locked = {job_id: store.jobs.lock_job(session, job_id) for job_id in sorted(each.job_id for each in starting)}
        for decision in starting:
            job = locked[decision.job_id]
            if job is not None and job.state is JobState.QUEUED:
                attempts.reserve(session, job, now, decision.workers, decision.free)
        store.queue.note_starts(session, {(job.pool, job.tenant) for job in locked.values() if job is not None}, now)
    if starting:
        context.wake()


def _to_start(context: DispatcherContext, session: Session, present: Mapping[str, int], now: datetime) -> list[Decision]:
    """The queued jobs that start now, with their numbers of ranks."""
    pools = context.settings.pools
    queue = [job for pool in pools for job in store.queue.head_of_queue(session, pool.name)]
    if not queue:
        return []
    states = pool_states(pools, present, store.queue.use_by_tenant(session))
    decisions = decide(queue, states, now, context.settings.lease_grace_s, space_for(queue, context.settings))
    return [each for each in decisions if each.why is None]
