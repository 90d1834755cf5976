"""Plans queued jobs of pools that state their devices' memory, before they are placed.

Plans are made elsewhere (`octet.service.jobs.planning`) and take seconds. A step asks for those of the jobs at the heads of the
queues, a few at a time, and writes what has come. While slots are free a job waits for its turn no longer than a plan may take,
and is then placed without one. Only level auto waits longer, since it cannot start without. Pools that state no memory cost
nothing.
"""

import json
from importlib.metadata import version

from sqlalchemy.orm import Session

from octet.api_schemas import JobSpec, JobState, PoolConfig
from octet.api_schemas.job_plan import JobPlan
from octet.api_schemas.plan import not_planned
from octet.service import store
from octet.service.dispatcher.context import AskedPlan, DispatcherContext
from octet.service.jobs import planned
from octet.service.jobs.planning import DEADLINE_S, why_no_peaks
from octet.service.scheduling.pools import read_pools

MOST_ASKED = 8
"""Jobs whose plans are made at once: one may take a dozen traces, and the planner turns down more than 64."""
PATIENCE_WITH_AUTO_S = 300.0
ASK_AGAIN_AFTER_S = 10.0


def step(context: DispatcherContext) -> None:
    pools = {pool.name: pool for pool in context.settings.pools if pool.plans_jobs}
    if not pools:
        return
    _write_all(context, _collect(context, pools))
    with context.database.read() as session:
        heads = [job for name in pools for job in store.queue.head_of_queue(session, name)]
        waiting = {job.id: job.pool for job in heads if not job.is_planned}
        now_s = context.monotonic()
        context.unplanned_since_s = {job_id: context.unplanned_since_s.get(job_id, now_s) for job_id in waiting}
        unasked = [job_id for job_id in waiting if job_id not in context.asked_plans]
        room = max(0, MOST_ASKED - len(context.asked_plans))
        have_slots = _pools_with_slots(context, session) if unasked[room:] else set()
        late = [each for each in unasked[room:] if waiting[each] in have_slots and _waits_s(context, each) >= DEADLINE_S]
        texts = store.queue.specs_of(session, unasked[:room] + late) if unasked else {}
    specs = {job_id: JobSpec.read_stored(json.loads(text)) for job_id, text in texts.items()}
    for job_id in unasked[:room]:
        if job_id in specs:
            _ask(context, job_id, specs[job_id], pools[waiting[job_id]])
    reason = f"its turn to be planned did not come within {DEADLINE_S:g} s"
    resolved = [job_id for job_id in late if job_id in specs and specs[job_id].precision.is_resolved]
    _write_all(context, {job_id: _without(specs[job_id], pools[waiting[job_id]], reason) for job_id in resolved})


def _collect(context: DispatcherContext, pools: dict[str, PoolConfig]) -> dict[str, JobPlan]:
    """Take the plans that were made since the last step, by job."""
    found: dict[str, JobPlan] = {}
    for job_id, asked in list(context.asked_plans.items()):
        if asked.plan.done() and (plan := _made(context, job_id, asked, pools[asked.pool])) is not None:
            del context.asked_plans[job_id]
            found[job_id] = plan
    return found


def _pools_with_slots(context: DispatcherContext, session: Session) -> set[str]:
    now = context.database.now(session)
    return {pool.name for pool in read_pools(session, context.settings, now) if pool.slots_free}


def _waits_s(context: DispatcherContext, job_id: str) -> float:
    now_s = context.monotonic()
    return now_s - context.unplanned_since_s.get(job_id, now_s)


def _ask(context: DispatcherContext, job_id: str, spec: JobSpec, pool: PoolConfig) -> None:
    plan = context.planning.plan_job(spec, pool)
    context.asked_plans[job_id] = AskedPlan(spec, pool.name, plan, context.monotonic())
    plan.add_done_callback(lambda _: context.wake())


def _made(context: DispatcherContext, job_id: str, asked: AskedPlan, pool: PoolConfig) -> JobPlan | None:
    """Return the plan that was made. None if it chose no level in time, and is asked for again: late traces are kept."""
    error = asked.plan.exception()
    plan = _without(asked.spec, pool, f"the planner failed: {error!r}") if error is not None else asked.plan.result()
    is_waited_for = job_id in context.unplanned_since_s and _waits_s(context, job_id) < PATIENCE_WITH_AUTO_S
    if plan.level is not None or not is_waited_for or why_no_peaks(context.settings):
        return plan
    if context.monotonic() - asked.asked_s >= ASK_AGAIN_AFTER_S:
        _ask(context, job_id, asked.spec, pool)
    return None


def _without(spec: JobSpec, pool: PoolConfig, reason: str) -> JobPlan:
    return not_planned(spec, pool, reason, version("octet-fp8"))


def _write_all(context: DispatcherContext, plans: dict[str, JobPlan]) -> None:
    if plans:
        context.each(lambda job_id: _write(context, job_id, plans[job_id]), plans)
        context.wake()


def _write(context: DispatcherContext, job_id: str, plan: JobPlan) -> None:
    """Apply a plan to its job, unless it was planned, stopped or deleted meanwhile."""
    with context.write() as (session, now):
        job = store.jobs.lock_job(session, job_id)
        if job is not None and job.state is JobState.QUEUED and job.plan is None:
            planned.apply(session, job, plan, now)
