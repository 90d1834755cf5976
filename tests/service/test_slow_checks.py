"""Checks of data that take long hold up neither `/healthz` nor each other without end."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api_schemas import JobSpec
from service.jobs import admission
from tests.service.test_jobs_api import problem_of
from tests.service.world import World
from tests.waiting import LONG_S

Document = dict[str, Any]
NUM_REQUESTS = 41  # one more than FastAPI has threads


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Semaphore, threading.Event]]:
    """Checks that begin and do not end: a semaphore that counts them, and an event that lets them go."""
    begun, let_go = threading.Semaphore(0), threading.Event()

    def hold(*_: Any) -> None:
        begun.release()
        assert let_go.wait(LONG_S)

    monkeypatch.setattr(admission, "check_files", hold)
    yield begun, let_go
    let_go.set()


def different(spec_document: Document, number: int) -> list[Document]:
    """Make jobs of which no two have the same check."""
    return [spec_document | {"training": spec_document["training"] | {"sequence_length": 8 + each}} for each in range(number)]


def test_healthz_answers_while_many_checks_run(
    client: TestClient, spec_document: Document, held: tuple[threading.Semaphore, threading.Event]
) -> None:
    begun, let_go = held
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        answers = [
            threads.submit(client.post, "/v1/jobs/validate", json=each) for each in different(spec_document, NUM_REQUESTS)
        ]
        for _ in range(admission.CHECKS_AT_ONCE):
            assert begun.acquire(timeout=20)
        assert client.get("/healthz").status_code == 200
        assert client.get("/v1/jobs").status_code == 200
        assert not begun.acquire(blocking=False)
        let_go.set()
        assert {answer.result(30).status_code for answer in answers} == {200}


def test_a_check_that_gets_no_turn_is_503(
    client: TestClient, world: World, spec_document: Document, held: tuple[threading.Semaphore, threading.Event]
) -> None:
    begun, let_go = held
    object.__setattr__(world.settings, "data_check_timeout_s", 0.05)
    with ThreadPoolExecutor(admission.CHECKS_AT_ONCE) as threads:
        answers = [
            threads.submit(client.post, "/v1/jobs/validate", json=each)
            for each in different(spec_document, admission.CHECKS_AT_ONCE)
        ]
        for _ in range(admission.CHECKS_AT_ONCE):
            assert begun.acquire(timeout=20)
        problem = problem_of(client.post("/v1/jobs/validate", json=spec_document), 503)
        assert "no turn came" in problem.detail
        let_go.set()
        assert {answer.result(30).status_code for answer in answers} == {200}


def test_a_check_that_fails_when_it_is_repeated_lets_no_further_job_pass(
    world: World, spec_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that passed holds as long as this test; the second job has it repeated, and passes by the first."""
    num_checks = count(1)

    def check(*_: Any) -> None:
        if next(num_checks) > 1:
            raise ValueError("the files have changed")

    monkeypatch.setattr(admission, "check_files", check)
    monkeypatch.setattr(admission, "PASSED_S", LONG_S)
    monkeypatch.setattr(admission, "AGAIN_S", 0.0)

    async def submit() -> None:
        checks, spec = admission.Admission(world.settings), JobSpec.model_validate(spec_document)
        await checks.check(spec)
        await checks.check(spec)
        await asyncio.gather(*checks._again.values())
        with pytest.raises(ValueError, match="the files have changed"):
            await checks.check(spec)

    asyncio.run(submit())
