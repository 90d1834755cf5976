"""Places jobs: queued → starting. It asks the cluster for its slots first, then decides and writes in one transaction."""

from api_schemas import JobState
from service import store
from service.cluster.launcher import LauncherError
from service.dispatcher.context import DispatcherContext
from service.jobs import attempts
from service.scheduling.decide import decide, pool_states


def step(context: DispatcherContext) -> None:
    try:
        present = {pool.pool: pool.slots_present for pool in context.launcher.capacity()}
    except LauncherError as error:
        context.outage.begins(error)
        return
    context.outage.ends()
    pools = [pool.name for pool in context.settings.pools]
    with context.database.read() as session:
        queue = [job for pool in pools for job in store.queue.head_of_queue(session, pool)]
        if store.queue.slots_present(session) == present and not queue:
            return
    with context.write() as (session, now):
        if store.queue.slots_present(session) != present:
            store.queue.set_slots_present(session, present, now)
        states = pool_states(context.settings.pools, present, store.queue.slots_used(session))
        queue = [job for pool in pools for job in store.queue.head_of_queue(session, pool)]
        decisions = decide(queue, states, now, context.settings.lease_grace_s)
        for decision in decisions:
            if decision.why is not None:
                continue
            job = store.jobs.lock_job(session, decision.job_id)
            if job is not None and job.state is JobState.QUEUED:
                attempts.reserve(session, job, now)
    if any(decision.why is None for decision in decisions):
        context.wake()
