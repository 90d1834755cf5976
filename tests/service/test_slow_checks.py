"""Checks of data that take long hold up neither `/healthz` nor each other without end."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import JobSpec
from octet.service.jobs import admission
from octet.service.jobs.check_processes import CheckProcesses
from octet.service.jobs.file_checks import inputs_of
from tests.kit.waiting import LONG_S
from tests.service.databases import ON_SQLITE
from tests.service.test_jobs_api import problem_of
from tests.service.world import World

Document = dict[str, Any]
NUM_REQUESTS = 41  # one more than FastAPI has threads


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Semaphore, threading.Event]]:
    """Checks that begin and do not end: a semaphore that counts them, and an event that lets them go."""
    begun, let_go = threading.Semaphore(0), threading.Event()

    def hold(*_: Any) -> None:
        begun.release()
        assert let_go.wait(LONG_S)

    monkeypatch.setattr(CheckProcesses, "check", hold)
    yield begun, let_go
    let_go.set()


def different(spec_document: Document, number: int) -> list[Document]:
    """Return `number` jobs that each need a check of their own."""
    return [spec_document | {"training": spec_document["training"] | {"sequence_length": 8 + each}} for each in range(number)]


@ON_SQLITE
def test_healthz_answers_while_many_checks_run(
    client: TestClient, spec_document: Document, held: tuple[threading.Semaphore, threading.Event]
) -> None:
    begun, let_go = held
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        answers = [
            threads.submit(client.post, "/v1/jobs/validate", json=each) for each in different(spec_document, NUM_REQUESTS)
        ]
        for _ in range(admission.CHECKS_OF_TENANT):
            assert begun.acquire(timeout=LONG_S)
        assert client.get("/healthz").status_code == 200
        assert client.get("/v1/jobs").status_code == 200
        assert not begun.acquire(blocking=False)
        let_go.set()
        assert {answer.result(30).status_code for answer in answers} == {200}


@ON_SQLITE
def test_a_check_that_gets_no_turn_is_503(
    client: TestClient, world: World, spec_document: Document, held: tuple[threading.Semaphore, threading.Event]
) -> None:
    begun, let_go = held
    object.__setattr__(world.settings, "data_check_timeout_s", 0.05)
    with ThreadPoolExecutor(admission.CHECKS_OF_TENANT) as threads:
        answers = [
            threads.submit(client.post, "/v1/jobs/validate", json=each)
            for each in different(spec_document, admission.CHECKS_OF_TENANT)
        ]
        for _ in range(admission.CHECKS_OF_TENANT):
            assert begun.acquire(timeout=LONG_S)
        problem = problem_of(client.post("/v1/jobs/validate", json=spec_document), 503)
        assert "no turn came" in problem.detail
        let_go.set()
        assert {answer.result(30).status_code for answer in answers} == {200}


@ON_SQLITE
def test_jobs_with_the_same_inputs_share_the_checks_that_passed(
    client: TestClient, spec_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that waited for a turn while one passed need none of their own."""
    num_checks = count()

    def check(*_: Any) -> None:
        next(num_checks)

    monkeypatch.setattr(CheckProcesses, "check", check)
    monkeypatch.setattr(admission, "PASSED_S", LONG_S)
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        named = [spec_document | {"name": f"job-{number}"} for number in range(NUM_REQUESTS)]
        answers = [threads.submit(client.post, "/v1/jobs/validate", json=each) for each in named]
        assert {answer.result(30).status_code for answer in answers} == {200}
    assert next(num_checks) <= admission.CHECKS_OF_TENANT


@pytest.mark.parametrize(
    ("part", "change", "shares"),
    [
        ("training", {"optimizer": {"learning_rate": 1e-4}}, True),
        ("training", {"sequence_length": 16}, False),
        ("data", {"path": "/elsewhere"}, False),
        ("model", {"num_layers": 2}, False),
    ],
)
def test_jobs_share_a_check_if_they_read_the_same(spec_document: Document, part: str, change: Document, shares: bool) -> None:
    specs = [
        JobSpec.model_validate(spec_document | {part: each}) for each in (spec_document[part], spec_document[part] | change)
    ]
    one, other = (inputs_of(spec).key for spec in specs)
    assert (one == other) is shares
    assert one == inputs_of(specs[0].model_copy(update={"name": "another"})).key


def test_jobs_whose_options_have_no_hash_share_no_check(spec_document: Document) -> None:
    inputs = inputs_of(JobSpec.model_validate(spec_document))._replace(model=[])  # type: ignore[arg-type]
    assert inputs.key != inputs.key


@ON_SQLITE
def test_a_check_that_fails_is_made_again(client: TestClient, spec_document: Document) -> None:
    path = spec_document["data"]["path"] + ".away"
    document = spec_document | {"data": spec_document["data"] | {"path": path}}
    assert client.post("/v1/jobs/validate", json=document).status_code == 422
    shutil.copytree(spec_document["data"]["path"], path)
    assert client.post("/v1/jobs/validate", json=document).status_code == 200
