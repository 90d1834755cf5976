"""Jobs as the routes show them: the row, its current attempt, and its place in the queue while it waits."""

from collections.abc import Sequence

from fastapi import Response
from sqlalchemy.orm import Session

from octet.api_schemas import Job, JobState
from octet.service import store
from octet.service.db.bulk import Transaction, session_of
from octet.service.db.tables import JobRow
from octet.service.deps import AppContext
from octet.service.errors import NotFound
from octet.service.jobs import views
from octet.service.jobs.requests import Request, Submission
from octet.service.jobs.submissions import Shown, Stored
from octet.service.scheduling.decide import WAITS_FOR_PLAN
from octet.service.scheduling.places import STARTS_SOON
from octet.service.store.job_queries import ShownRow
from octet.service.store.jobs import NewJob


def existing_job(session: Session, job_id: str, tenant: str | None) -> JobRow:
    """Return a job. Raises NotFound, also for another tenant's job."""
    job = store.jobs.find_job(session, job_id, tenant)
    if job is None:
        raise NotFound(f"there is no job {job_id}")
    return job


def rendered_jobs(session: Session, context: AppContext, rows: Sequence[ShownRow]) -> list[str]:
    """Render jobs as JSON in the order of the rows, in a transaction that only reads."""
    places = context.places.read(session, [row for row in rows if row.state is JobState.QUEUED])
    return [views.job(row, places.get(row.id)).model_dump_json() for row in rows]


def shown_job(session: Session, context: AppContext, row: JobRow) -> Job:
    """Show a job that this transaction has written."""
    session.flush()
    queued = [row] if row.state is JobState.QUEUED else []
    places = context.places.read_while_writing(session, queued)
    return views.job(_stored_row(session, row.id), places.get(row.id))


def shown_submissions(
    transaction: Transaction, context: AppContext, pairs: Sequence[tuple[Request, Submission]]
) -> list[Shown]:
    """Show submitted jobs. A replayed one is shown as it was stored, whose defaults may be those of an older version."""
    jobs = [submission.job for _, submission in pairs]
    new = {job.id: job for job in jobs if isinstance(job, NewJob)}
    known = {job.id: job for job in jobs if isinstance(job, JobRow)}
    queued = [row for row in known.values() if row.state is JobState.QUEUED]
    places = context.places.read_while_writing(transaction, [*new.values(), *queued])
    asked = {submission.job.id: request for request, submission in pairs}
    shown: dict[str, Shown] = {}
    for id_, request in asked.items():
        place = places.get(id_)
        if id_ in new:
            job = views.job(store.job_queries.shown_as_new(new[id_]), place, request.spec)
        else:
            with session_of(transaction) as session:
                job = views.job(_stored_row(session, id_), place)
        shown[id_] = Shown(id_, job.model_dump_json(), place is not None and place.why in (STARTS_SOON, WAITS_FOR_PLAN))
    return [shown[submission.job.id] for _, submission in pairs]


def _stored_row(session: Session, job_id: str) -> ShownRow:
    row = store.job_queries.find_job(session, job_id)
    if row is None:  # a submission that is replayed may lose its job to another transaction
        raise NotFound(f"there is no job {job_id} any more")
    return row


def accepted(stored: Stored, context: AppContext) -> Response:
    """Answer a submission, and wake the dispatcher if the job starts soon."""
    headers = {"Location": f"/v1/jobs/{stored.job.job_id}"} | ({"Idempotent-Replayed": "true"} if stored.replayed else {})
    if stored.job.starts_soon:
        context.wake()  # for a job that has to wait, the dispatcher would read the queue in vain
    return Response(stored.job.text, 201, headers, media_type="application/json")


def all_accepted(stored: Sequence[Stored], context: AppContext) -> Response:
    """Answer a batch as `accepted` answers a submission."""
    if any(each.job.starts_soon for each in stored):
        context.wake()
    headers = {"Idempotent-Replayed": "true"} if all(each.replayed for each in stored) else {}
    jobs = ",".join(each.job.text for each in stored)
    return Response(f'{{"jobs":[{jobs}]}}', 201, headers, media_type="application/json")
