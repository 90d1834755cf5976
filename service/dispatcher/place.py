"""Places jobs: queued → starting. It asks the cluster for its slots first, then decides and writes in one transaction.

A pass that would change nothing writes nothing: while jobs wait, the decision is taken on a read alone.
"""

import logging
from collections.abc import Sequence
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

logger = logging.getLogger(__name__)


def step(context: DispatcherContext) -> None:
    try:
        capacities = [_with_own_address(context, each) for each in context.launcher.capacity()]
    except LauncherError as error:
        context.outage.begins(error)
        return
    context.outage.ends()
    _warn_of_missing_devices(context, capacities)
    with context.database.read() as session:
        is_known = set(capacities) <= set(store.queue.capacities(session))
        if is_known and all(each.why for each in decisions(context, session, context.database.now(session), capacities)):
            return
    with context.write() as (session, now):
        if not is_known:
            store.queue.set_capacities(session, capacities, now)
        starting = [each for each in decisions(context, session, now, capacities) if each.why is None]
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


def _warn_of_missing_devices(context: DispatcherContext, capacities: Sequence[PoolCapacity]) -> None:
    """Say so in the log, at the start and whenever it changes, if nodes promise slots that they have no device for."""
    found = {each.pool: each.slots_without_device for each in capacities if each.slots_without_device}
    if found != context.slots_without_device:
        for pool, number in found.items():
            words = "pool %s: its nodes offer %d slots that they have no GPU for, so no job gets them; lower the pool's slots"
            logger.warning(f"{words}, or start Ray there with --num-gpus", pool, number)
        context.slots_without_device = found


def decisions(
    context: DispatcherContext, session: Session, now: datetime, capacities: Sequence[PoolCapacity] | None = None
) -> list[Decision]:
    """Decide about the heads of all queues. capacities: what the cluster has; by default what is stored of it."""
    queue = [job for pool in context.settings.pools for job in store.queue.head_of_queue(session, pool.name)]
    if not queue:
        return []
    space = space_for(queue, context.settings)
    return decide(queue, read_pools(session, context.settings, now, capacities), now, context.settings.lease_grace_s, space)
