"""A database that somebody else holds locked: every writer is answered 503 in time, and works again afterwards."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionFree

from octet.api_schemas import PhaseReport
from octet.service.app import create_app
from octet.service.db.engine import Database
from octet.service.db.group_commit import GroupCommit
from tests.kit.waiting import LONG_S
from tests.service.conftest import TestClient
from tests.service.world import TurnedClock, World

LOCK_TIMEOUT_S = 1.0
WRITERS = 12
MORE_THAN_A_POOL_HAS = 100


@contextmanager
def locked(url: str) -> Iterator[None]:
    """Hold the lock that every writer needs, on a connection of our own."""
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg") if url.startswith("postgres") else url)
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            connection.exec_driver_sql("LOCK TABLE jobs, attempts IN EXCLUSIVE MODE")
        yield
        connection.rollback()
    engine.dispose()


@pytest.fixture
def impatient(database_url: str, clock: TurnedClock) -> Iterator[Database]:
    database = Database(database_url, clock, lock_timeout_s=LOCK_TIMEOUT_S)
    yield database
    database.close()


@pytest.fixture
def client(impatient: Database, world: World, openapi_document: dict[str, Any]) -> Iterator[TestClient]:
    app = create_app(world.settings, database=impatient)
    app.openapi_schema = openapi_document  # slow to make
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


def test_all_writers_are_answered_in_time_and_told_to_come_back(
    client: TestClient, world: World, database_url: str, spec_document: dict[str, Any]
) -> None:
    _, rank = world.start()
    report = rank.batch(PhaseReport(phase="process_up")).model_dump(mode="json")
    path = f"/internal/v1/attempts/{rank.order.attempt_id}/reports"
    headers = {"Authorization": f"Bearer {rank.order.token}"}
    calls = [lambda: client.post("/v1/jobs", json=spec_document), lambda: client.post(path, json=report, headers=headers)]
    with locked(database_url), ThreadPoolExecutor(WRITERS) as threads:
        began = time.monotonic()
        answers = [future.result() for future in [threads.submit(calls[number % 2]) for number in range(WRITERS)]]
        waited_s = time.monotonic() - began
    assert [answer.status_code for answer in answers] == [503] * WRITERS
    assert {answer.json()["code"] for answer in answers} == {"not_ready"}
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in answers)
    assert waited_s < WRITERS / 2 * LOCK_TIMEOUT_S, "they wait at the same time, not one after the other"
    assert [call().status_code for call in calls] == [201, 200]


@pytest.mark.parametrize(
    "failure", [OperationalError("BEGIN IMMEDIATE", None, Exception("database is locked")), NoConnectionFree("no connection")]
)
def test_whoever_waits_for_a_locked_database_waits_once(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octet.service.db.group_commit.KEPT_WAITING_S", 0.0)
    begun, let_go, tried = threading.Event(), threading.Event(), list[list[int]]()

    def write(requests: Sequence[int]) -> list[int]:
        tried.append([*requests])
        if let_go.is_set():
            return [*requests]
        begun.set()
        let_go.wait(LONG_S)
        raise failure

    commits = GroupCommit[int, int]("writer", write)
    futures = [commits.submit(1)]
    assert begun.wait(LONG_S)
    futures += [commits.submit(number) for number in range(2, 200)]
    let_go.set()
    assert {future.exception(LONG_S) for future in futures} == {failure}
    assert tried == [[1]], "nobody else waited for a transaction of their own"
    assert commits.submit(200).result(LONG_S) == 200


def test_readers_are_not_held_up(client: TestClient, world: World, database_url: str) -> None:
    job_id = world.submit()
    with locked(database_url):
        assert client.get(f"/v1/jobs/{job_id}").status_code == 200


def test_a_process_without_a_free_connection_says_so(client: TestClient, impatient: Database, world: World) -> None:
    job_id = world.submit()
    with ExitStack() as taken:
        with contextlib.suppress(NoConnectionFree):
            for _ in range(MORE_THAN_A_POOL_HAS):
                taken.enter_context(impatient.read()).connection()
        answer = client.get(f"/v1/jobs/{job_id}")
    assert (answer.status_code, "Retry-After" in answer.headers) == (503, True)
    assert client.get(f"/v1/jobs/{job_id}").status_code == 200
