"""Plans: what a job would take, before it is submitted."""

import asyncio

from fastapi import APIRouter
from fastapi import Request as HttpRequest

from octet.api_schemas.plan import Plan, PlanRequest
from octet.service.deps import AppContextDep
from octet.service.http.bodies import body_of, read_json
from octet.service.http.problems import answers
from octet.service.jobs.admission import check_options

router = APIRouter(prefix="/v1", tags=["jobs"])


@router.post("/plans", operation_id="plan_job", responses=answers(400, 413, 422), openapi_extra=body_of(PlanRequest))
async def plan(http_request: HttpRequest, context: AppContextDep) -> Plan:
    """Predict the bytes of a job at each level, the pools that it fits, and what would make it fit. Nothing is stored.

    Neither its data nor its model's files are read.
    """
    request = await read_json(http_request, PlanRequest)
    check_options(request.job, context.settings)
    return await asyncio.wrap_future(context.planning.plan(request))
