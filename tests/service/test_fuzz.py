"""The API against generated requests, good and bad: no answer is a 5xx, and each matches the OpenAPI document."""

from typing import Any

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.service.world import Rank, World

URL = "http://127.0.0.1:8000"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@pytest.mark.parametrize("num_examples", [5, pytest.param(50, marks=pytest.mark.matrix)])
def test_generated_requests_are_answered_as_documented(client: TestClient, world: World, num_examples: int) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app, headers={"Host": "127.0.0.1"})
    job_id, rank = world.start()
    rank.train(1, 2)
    num_requests = 0
    for result in schema.get_all_operations():
        num_requests += fuzz(result.ok(), job_id, rank, num_examples)
    assert num_requests >= 15 * num_examples / 2


def fuzz(operation: Any, job_id: str, rank: Rank, num_examples: int) -> int:
    """Send generated requests to one operation, some about a job and an attempt that exist. Returns how many were sent."""
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])
    num_requests = 0

    @settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=QUIET)
    @given(case=cases, is_known=st.booleans())
    def answer(case: schemathesis.Case, is_known: bool) -> None:
        nonlocal num_requests
        if is_known and "job_id" in case.path_parameters:
            case.path_parameters["job_id"] = job_id
        if is_known and "attempt_id" in case.path_parameters:
            case.path_parameters["attempt_id"] = rank.order.attempt_id
            case.headers["Authorization"] = f"Bearer {rank.order.token}"
        case.headers.pop("Accept", None)  # a stream of a job that runs has no end
        case.validate_response(case.call(base_url=URL), checks=CHECKS)
        num_requests += 1

    answer()
    return num_requests
