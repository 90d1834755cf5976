"""Jobs as the routes show them: the row, its current attempt, and its place in the queue while it waits."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from api_schemas import Job, JobSpec, JobState, QueuePlace
from service import store
from service.db.tables import JobRow
from service.deps import AppContext
from service.jobs import views
from service.jobs.requests import Request, Submission
from service.scheduling.decide import decide, pool_states
from service.scheduling.space import space_for

_STARTS_SOON = "it fits and starts with the next pass of the dispatcher"


def shown_job(session: Session, context: AppContext, row: JobRow) -> Job:
    return _shown(session, context, [row], {})[0]


def shown_submissions(session: Session, context: AppContext, pairs: Sequence[tuple[Request, Submission]]) -> list[Job]:
    """Show submitted jobs, with the specs that were asked for, so that the stored ones are not parsed again."""
    new = {submission.job.id: submission.job for _, submission in pairs if not submission.replayed}
    places = _queue_places(session, context, list(new.values()))
    replayed = {submission.job.id: submission.job for _, submission in pairs if submission.job.id not in new}
    specs = {submission.job.id: request.spec for request, submission in pairs}
    shown = {job.id: job for job in _shown(session, context, list(replayed.values()), specs)}
    shown |= {id_: views.new_job(row, places[id_], specs[id_]) for id_, row in new.items()}
    return [shown[submission.job.id] for _, submission in pairs]


def shown_jobs(session: Session, context: AppContext, rows: Sequence[JobRow]) -> list[Job]:
    """Show jobs in the order of the rows."""
    return _shown(session, context, rows, {})


def starts_soon(job: Job) -> bool:
    """Return True if the next pass of the dispatcher starts the job."""
    return job.queue is not None and job.queue.why == _STARTS_SOON


def _shown(session: Session, context: AppContext, rows: Sequence[JobRow], specs: dict[str, JobSpec]) -> list[Job]:
    session.flush()
    current = store.jobs.current_attempts(session, rows)
    places = _queue_places(session, context, [row for row in rows if row.state is JobState.QUEUED])
    return [views.job(row, current.get(row.id), places.get(row.id), specs.get(row.id)) for row in rows]


def _queue_places(session: Session, context: AppContext, rows: Sequence[JobRow]) -> dict[str, QueuePlace]:
    """Find where queued jobs stand, by the decision that the dispatcher takes. Far back in the queue only the number counts."""
    places: dict[str, QueuePlace] = {}
    positions = store.queue.positions(session, rows) if rows else {}
    near = {row.pool for row in rows if positions[row.id] <= store.queue.HEAD_OF_QUEUE}
    if near:
        heads = [job for pool in near for job in store.queue.head_of_queue(session, pool)]
        states = pool_states(context.settings.pools, store.queue.slots_present(session), store.queue.slots_used(session))
        now, grace_s = context.database.now(session), context.settings.lease_grace_s
        decisions = decide(heads, states, now, grace_s, space_for(heads, context.settings))
        places |= {each.job_id: QueuePlace(position=each.position, why=each.why or _STARTS_SOON) for each in decisions}
    for row in rows:
        if row.id not in places:
            position = positions[row.id]
            places[row.id] = QueuePlace(position=position, why=f"{position - 1} jobs are ahead in pool {row.pool!r}")
    return places
