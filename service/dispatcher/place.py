"""queued → starting: give slots to the jobs whose turn it is. Asks the cluster first, decides and writes in one transaction."""

from api_schemas import JobState
from service.cluster.launcher import LauncherError
from service.dispatcher.work import Work
from service.jobs import attempts, store, store_queue
from service.scheduling.plan import plan, pool_states


def step(work: Work) -> None:
    try:
        present = {pool.pool: pool.slots_present for pool in work.launcher.capacity()}
    except LauncherError as error:
        work.outage.begins(error)
        return
    work.outage.ends()
    pools = [pool.name for pool in work.settings.pools]
    with work.database.read() as session:
        queue = [job for pool in pools for job in store_queue.head_of_queue(session, pool)]
        if store_queue.slots_present(session) == present and not queue:
            return
    with work.write() as (session, now):
        if store_queue.slots_present(session) != present:
            store_queue.set_slots_present(session, present, now)
        states = pool_states(work.settings.pools, present, store_queue.slots_used(session))
        queue = [job for pool in pools for job in store_queue.head_of_queue(session, pool)]
        decisions = plan(queue, states, now, work.settings.lease_grace_s)
        for decision in decisions:
            if decision.why is not None:
                continue
            job = store.lock_job(session, decision.job_id)
            if job is not None and job.state is JobState.QUEUED:
                attempts.reserve(session, job, now)
    if any(decision.why is None for decision in decisions):
        work.wake()
