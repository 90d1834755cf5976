"""Places jobs: queued → starting. It asks the cluster for its slots first, then decides and writes in one transaction.

A pass that would change nothing writes nothing: while jobs wait, the decision is taken on a read alone.
"""

from collections.abc import Mapping
from datetime import datetime
from urllib.parse import urlsplit

from sqlalchemy.orm import Session

from octet.api_schemas import JobState, PoolCapacity
from octet.service import store
from octet.service.cluster.launcher import LauncherError
from octet.service.dispatcher.context import DispatcherContext
from octet.service.jobs import attempts
from octet.service.scheduling.decide import Decision, decide
from octet.service.scheduling.pools import read_pools, space_for


def step(context: DispatcherContext) -> None:
    try:
        capacities = [_with_own_address(context, each) for each in context.launcher.capacity()]
    except LauncherError as error:
        context.outage.begins(error)
        return
    context.outage.ends()
    present = {pool.pool: pool.slots_present for pool in capacities}
    with context.database.read() as session:
        is_known = set(capacities) <= set(store.queue.capacities(session))
        if is_known and all(each.why for each in decisions(context, session, context.database.now(session), present)):
            return
    with context.write() as (session, now):
        if not is_known:
            store.queue.set_capacities(session, capacities, now)
        starting = [each for each in decisions(context, session, now, present) if each.why is None]
        # In the order in which comparisons and reports lock jobs, too: any other could lock two transactions in each other.
        locked = {job_id: store.jobs.lock_job(session, job_id) for job_id in sorted(each.job_id for each in starting)}
        for decision in starting:
            job = locked[decision.job_id]
            if job is not None and job.state is JobState.QUEUED:
                attempts.reserve(session, job, now, decision.workers, decision.free, is_lent=decision.borrows)
        store.queue.note_starts(session, {(job.pool, job.tenant) for job in locked.values() if job is not None}, now)
    if starting:
        context.wake()


def _with_own_address(context: DispatcherContext, capacity: PoolCapacity) -> PoolCapacity:
    """Add this machine's own address to nodes that are on its loopback: its ranks serve metrics where they reach the server."""
    own = urlsplit(context.settings.effective_report_url).hostname
    if context.settings.report_url or own is None or own in capacity.nodes:
        return capacity
    return capacity.model_copy(update={"nodes": (*capacity.nodes, own)})


def decisions(
    context: DispatcherContext, session: Session, now: datetime, present: Mapping[str, int] | None = None
) -> list[Decision]:
    """Decide about the heads of all queues. present: the slots that the cluster has, by pool; by default as last stored."""
    queue = [job for pool in context.settings.pools for job in store.queue.head_of_queue(session, pool.name)]
    if not queue:
        return []
    space = space_for(queue, context.settings)
    return decide(queue, read_pools(session, context.settings, now, present), now, context.settings.lease_grace_s, space)
