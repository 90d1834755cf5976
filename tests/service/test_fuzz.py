"""The API against generated requests, good and bad: no answer is a 5xx, and each matches the OpenAPI document.

Most requests are about jobs, attempts, checkpoints and files that exist, in every state, and a job that a request makes is
the subject of later ones. So at most a tenth of the answers may be 404.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.service.test_checkpoint_files import write_checkpoint
from tests.service.test_exports_api import write_export
from tests.service.world import Rank, World, step

if TYPE_CHECKING:
    import schemathesis

URL = "http://127.0.0.1:8000"
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


MAX_NOT_FOUND = 0.1
UNKNOWN_ID = 19
"""One request in twenty keeps the ids that were generated for it."""


@dataclass
class Known:
    """Existing things to ask for: path parameters of requests that find something, and an attempt with its token."""

    rank: Rank
    spec_document: dict[str, Any]
    paths: list[dict[str, str]]
    answers: Counter[int] = field(default_factory=Counter)

    def put_into(self, case: "schemathesis.Case", place: int) -> None:
        """Replace the generated ids by those of something that exists. place: any number, chooses what."""
        if "attempt_id" in case.path_parameters:
            case.path_parameters["attempt_id"] = self.rank.order.attempt_id
            case.headers["Authorization"] = f"Bearer {self.rank.order.token}"
        candidates = [path for path in self.paths if case.path_parameters.keys() <= path.keys()]
        if "name" in case.path_parameters:  # of a checkpoint or of an export
            candidates = [path for path in candidates if path["kind"] in case.operation.path]
        if candidates:
            case.path_parameters |= {name: candidates[place % len(candidates)][name] for name in case.path_parameters}

    def note(self, response: Any, case: "schemathesis.Case") -> None:
        """Count the answer, and remember a job that was made."""
        self.answers[response.status_code] += 1
        if response.status_code == 201 and case.operation.path == "/v1/jobs":
            self.paths.append({"job_id": response.json()["id"]})
        if response.status_code == 204:
            self.paths = [path for path in self.paths if not case.path_parameters.items() <= path.items()]


@pytest.fixture
def known(client: TestClient, world: World) -> Known:
    """A comparison, two keys, and a job in each state: over, cancelled, waiting, and one that runs and has files."""
    over, rank = world.start(name="over")
    rank.train(1, 2, 3, 4)
    rank.succeed()
    cancelled = world.submit(name="cancelled")
    world.cancel(cancelled)
    world.dispatch()
    runs, rank = world.start(name="runs")
    saved = write_checkpoint(world, runs)
    exported = write_export(world, runs)
    rank.send(step(1), step(2), saved, exported)
    waits = world.submit(name="waits", workers=2)
    paths: list[dict[str, str]] = [{"job_id": job_id} for job_id in (over, cancelled, waits)]
    of_checkpoint = {"job_id": runs, "kind": "checkpoints", "name": saved.name}
    of_export = {"job_id": runs, "kind": "exports", "name": exported.name}
    paths += [of_checkpoint | {"path": path} for path in ("state.json", "manifest.json")]
    paths += [of_export | {"path": path} for path in ("config.json", "manifest.json")]
    spec_document = world.spec.model_dump(mode="json")
    compared = client.post("/v1/comparisons", json={"job": spec_document, "levels": ["fp32", "O2"], "seeds": 2})
    paths.append({"comparison_id": compared.json()["id"]})
    keys = [client.post("/v1/keys", json={"name": "known", "role": "viewer"}).json()["id"] for _ in range(2)]
    paths += [{"key_id": key_id} for key_id in keys]
    return Known(rank, spec_document, paths)


@pytest.mark.system
@pytest.mark.parametrize("num_examples", [5, pytest.param(50, marks=pytest.mark.matrix)])
def test_generated_requests_are_answered_as_documented(client: TestClient, known: Known, num_examples: int) -> None:
    import schemathesis

    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app, headers={"Host": "127.0.0.1"})
    operations = [result.ok() for result in schema.get_all_operations()]
    operations.sort(key=lambda operation: operation.method == "delete")  # what is deleted is asked no more
    for operation in operations:
        if operation.path != "/v1/stream":  # which has no end; tests/service/test_stream_api.py refuses what is wrong
            fuzz(operation, known, num_examples)
    num_requests = known.answers.total()
    assert num_requests >= 15 * num_examples / 2
    assert known.answers[404] <= MAX_NOT_FOUND * num_requests, known.answers
    assert known.answers[200] + known.answers[201] + known.answers[202] >= num_requests / 4, known.answers


def fuzz(operation: Any, known: Known, num_examples: int) -> None:
    """Send generated requests to one operation, and check each answer."""
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as of_document

    checks = [
        not_a_server_error,
        of_document.status_code_conformance,
        of_document.content_type_conformance,
        of_document.response_headers_conformance,
        of_document.response_schema_conformance,
    ]
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])

    @settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=QUIET)
    @given(case=cases, place=st.integers(0, UNKNOWN_ID), is_whole=st.booleans())
    def answer(case: Any, place: int, is_whole: bool) -> None:
        if place != UNKNOWN_ID and case.path_parameters:
            known.put_into(case, place)
        if is_whole and operation.path in {"/v1/jobs", "/v1/jobs/validate"} and operation.method == "post":
            case.body = known.spec_document
            case.media_type = "application/json"
        case.headers.pop("Accept", None)  # a stream of a job that runs has no end
        response = case.call(base_url=URL)
        known.note(response, case)
        case.validate_response(response, checks=checks)

    answer()
