"""Jobs as the routes show them: the row, its current attempt, and its place in the queue while it waits."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from api_schemas import Job, JobState
from service import store
from service.db.tables import JobRow
from service.deps import AppContext
from service.jobs import views
from service.jobs.requests import Request, Submission
from service.scheduling.places import STARTS_SOON
from service.store.shown import ShownRow


def rendered_jobs(session: Session, context: AppContext, rows: Sequence[ShownRow]) -> list[str]:
    """Render jobs as JSON in the order of the rows, in a transaction that only reads."""
    places = context.places.read(session, [row for row in rows if row.state is JobState.QUEUED])
    return [views.job_json(row, places.get(row.id)) for row in rows]


def shown_job(session: Session, context: AppContext, row: JobRow) -> Job:
    """Show a job that this transaction has written."""
    session.flush()
    queued = [row] if row.state is JobState.QUEUED else []
    places = context.places.read_while_writing(session, queued)
    return views.job(row, store.jobs.current_attempts(session, [row]).get(row.id), places.get(row.id))


def shown_submissions(session: Session, context: AppContext, pairs: Sequence[tuple[Request, Submission]]) -> list[Job]:
    """Show submitted jobs, with the specs that were asked for, so that the stored ones are not parsed again."""
    new = {submission.job.id: submission.job for _, submission in pairs if not submission.replayed}
    known = {submission.job.id: submission.job for _, submission in pairs if submission.job.id not in new}
    session.flush()
    current = store.jobs.current_attempts(session, list(known.values()))
    queued = [row for row in (*new.values(), *known.values()) if row.state is JobState.QUEUED]
    places = context.places.read_while_writing(session, queued)
    specs = {submission.job.id: request.spec for request, submission in pairs}
    shown = {id_: views.job(row, current.get(id_), places.get(id_), specs[id_]) for id_, row in known.items()}
    shown |= {id_: views.new_job(row, places[id_], specs[id_]) for id_, row in new.items()}
    return [shown[submission.job.id] for _, submission in pairs]


def starts_soon(job: Job) -> bool:
    """Return True if the next pass of the dispatcher starts the job."""
    return job.queue is not None and job.queue.why == STARTS_SOON
