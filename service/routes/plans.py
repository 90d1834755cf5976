"""Plans: what a job would take, before it is submitted."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse

from octet.api_schemas.plan import Plan, PlanRequest
from octet.service.deps import AppContextDep
from octet.service.http.bodies import body_of, read_json
from octet.service.http.problems import Answers, answers
from octet.service.jobs.admission import check_options

NDJSON = "application/x-ndjson"
_LINES: Answers = {200: {"model": Plan, "content": {NDJSON: {"schema": {"type": "string"}}}}}

router = APIRouter(prefix="/v1", tags=["jobs"])


@router.post(
    "/plans",
    operation_id="plan_job",
    response_model=Plan,
    responses=answers(400, 413, 422) | _LINES,
    openapi_extra=body_of(PlanRequest),
)
async def plan(http_request: HttpRequest, context: AppContextDep) -> Response | Plan:
    """Predict the bytes of a job at each level, the pools that it fits, and what would make it fit. Nothing is stored.

    Neither its data nor its model's files are read. With `Accept: application/x-ndjson` each line is the plan as far as it is
    known: the states at once, then one more line with each peak, that of the job's own level first, and with each largest
    micro-batch. The last line is the plan.
    """
    request = await read_json(http_request, PlanRequest)
    check_options(request.job, context.settings)
    if NDJSON not in http_request.headers.get("accept", ""):
        return await asyncio.wrap_future(context.planning.plan(request))
    loop, known = asyncio.get_running_loop(), asyncio.Queue[Plan | None]()

    def put(rows: Plan | None) -> None:
        loop.call_soon_threadsafe(known.put_nowait, rows)

    planned = context.planning.plan(request, put)
    planned.add_done_callback(lambda _: put(None))
    return StreamingResponse(_lines(known, planned), media_type=NDJSON, headers={"Cache-Control": "no-store"})


async def _lines(known: asyncio.Queue[Plan | None], planned: "Future[Plan]") -> AsyncIterator[str]:
    """Write plans as they become known, then the whole one. A client that is gone gives the plan up."""
    whole = asyncio.wrap_future(planned)
    try:
        while (rows := await known.get()) is not None:
            yield f"{rows.model_dump_json()}\n"
        yield f"{(await whole).model_dump_json()}\n"
    finally:
        whole.cancel()
