"""A job's curve in buckets, at any length in about a hundred KB."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from octet.api_schemas import Violation
from octet.api_schemas.curve import MAX_BUCKETS, MAX_BUCKETS_OF_A_WIDTH, Curve
from octet.service import store
from octet.service.deps import JobIdDep, context_of, principal_of
from octet.service.errors import InvalidRequest
from octet.service.http.pages import AfterQuery, compressed_json
from octet.service.http.problems import answers
from octet.service.http.streams import cursor_of
from octet.service.jobs.curve import buckets_of, columns_of, evaluations_of, width_for
from octet.service.routes.job_views import existing_job
from octet.service.store.curves import CurvePlace

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["records"])

StepByQuery = Annotated[
    int | None, Query(ge=1, le=2**53, description="steps of a bucket; 1 for every step; default: as many as fit")
]


@router.get("/curve", response_model=Curve, operation_id="get_curve", responses=answers(404, 422))
def curve(
    request: Request,
    job_id: JobIdDep,
    points: Annotated[int, Query(ge=2, le=MAX_BUCKETS_OF_A_WIDTH, description="buckets, at most")] = 500,
    after: AfterQuery = 0,
    step_by: StepByQuery = None,
) -> Response:
    """The curve after step `after`, in columns.

    Without `step_by` all of it is in the answer, in at most 800 buckets. With it the answer has the
    first buckets of this width, at most 10,000, and `has_more`. A bucket of several steps has the
    mean of their losses, the least and the greatest.
    """
    if step_by is None and points > MAX_BUCKETS:
        message = "Ask for fewer, or give step_by."
        violation = Violation(field="points", got=str(points), allowed=f"up to {MAX_BUCKETS} without step_by", message=message)
        raise InvalidRequest.of((violation,))
    with context_of(request).database.read() as session:
        existing_job(session, job_id, principal_of(request).visible_tenant)
        first, last = store.curves.ends(session, job_id) or (None, None)
        end = last or 0
        width = step_by or width_for(max(0, end - after), points)
        until = min(end, (after // width + points) * width)
        buckets = list(buckets_of(store.curves.columns_between(session, job_id, after, until), width))
        evaluations = store.curves.evaluations_between(session, job_id, after, until)
        epoch = store.curves.trained_epoch(session, job_id)
    evaluated = evaluations[-1].step if evaluations else min(after, until)
    shown = Curve.model_construct(
        job_id=job_id,
        step_by=width,
        first_step=first,
        last_step=last,
        has_more=until < end,
        cursor=cursor_of("points", job_id, CurvePlace(epoch, until, evaluated)),
        evaluations=evaluations_of(evaluations, width),
        **columns_of(buckets),  # type: ignore[arg-type]
    )
    return compressed_json(request, shown.model_dump_json())
