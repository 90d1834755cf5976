"""A shortcut answers as the route that it stands for, byte by byte, and leaves what is unusual to it."""

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api_schemas import Job, JobSpec, Page
from service.http.shortcuts import Shortcut
from service.jobs import views
from tests.service.world import World, step

Ask = Callable[[TestClient, World], Any]
OF_THE_JOB = ("id", "created_at", "start", "queue")


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each request that reached a shortcut was answered by it."""
    found: list[bool] = []
    handle = Shortcut.handle

    async def watched(self: Shortcut, *request: Any) -> Any:
        answer = await handle(self, *request)
        found.append(answer is not None)
        return answer

    monkeypatch.setattr(Shortcut, "handle", watched)
    return found


def without_shortcuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shortcut, "matches", lambda *_: None)


def report(client: TestClient, world: World, **changes: Any) -> Any:
    rank = world.rank_of(next(iter(world.launcher.orders.values())).job_id)
    rank.seq = changes.pop("seq", 1)
    token = changes.pop("token", rank.order.token)
    batch = rank.batch(step(1)).model_dump(mode="json") | changes
    headers = {"Authorization": f"Bearer {token}"}
    return client.post(f"/internal/v1/attempts/{rank.order.attempt_id}/reports", json=batch, headers=headers)


def submit(
    client: TestClient, world: World, content_type: str = "application/json", key: str | None = None, **changes: Any
) -> Any:
    headers = {"Content-Type": content_type} | ({"Idempotency-Key": key} if key else {})
    return client.post("/v1/jobs", content=json.dumps(world.spec.model_dump(mode="json") | changes), headers=headers)


def cases(named: dict[str, Any], *always: str) -> list[Any]:
    """The names of all cases; those that are not `always` tested belong to the matrix."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.matrix) for name in named]


REPORTS: dict[str, tuple[bool, Ask]] = {
    "a step": (True, lambda client, world: report(client, world)),
    "a gap": (True, lambda client, world: report(client, world, seq=7)),
    "an old epoch": (True, lambda client, world: report(client, world, epoch=3)),
    "an unknown field": (False, lambda client, world: report(client, world, more=1)),
    "another token": (False, lambda client, world: report(client, world, token="none")),
}


@pytest.mark.parametrize("name", cases(REPORTS, "a step", "another token"))
def test_reports_get_the_same_answer(
    client: TestClient, world: World, answered: list[bool], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    world.start()
    report(client, world, reports=[])  # the token is remembered from now on
    is_usual, ask = REPORTS[name]
    first = ask(client, world)
    assert answered == [False, is_usual]
    without_shortcuts(monkeypatch)
    again = ask(client, world)
    assert (first.status_code, first.content) == (again.status_code, again.content)
    assert first.headers == again.headers


SUBMISSIONS: dict[str, tuple[bool, dict[str, Any]]] = {
    "a job": (True, {}),
    "a job with a key": (True, {"key": "one"}),
    "a job that no pool has": (True, {"resources": {"pool": "none", "workers": 1}}),
    "another type": (False, {"content_type": "application/json; charset=utf-8"}),
    "text": (False, {"content_type": "text/plain"}),
    "a key of other characters": (False, {"key": "o n e"}),
    "an unknown field": (False, {"steps": 1}),
    "a level that is not there": (False, {"precision": {"level": "O9"}}),
}


@pytest.mark.parametrize("name", cases(SUBMISSIONS, "a job", "an unknown field"))
def test_submissions_get_the_same_answer(
    client: TestClient, world: World, answered: list[bool], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    is_usual, changes = SUBMISSIONS[name]
    first = submit(client, world, **changes)
    assert answered == [is_usual]
    without_shortcuts(monkeypatch)
    if "key" in changes and first.status_code == 201:
        changes = changes | {"key": changes["key"] + "two"}
    again = submit(client, world, **changes)
    assert first.status_code == again.status_code
    shown, shown_again = first.json(), again.json()
    if first.status_code == 201:
        assert list(shown) == list(shown_again)
        for name_ in OF_THE_JOB:
            del shown[name_], shown_again[name_]
    assert shown == shown_again
    assert [name for name in first.headers] == [name for name in again.headers]


def test_a_repeated_key_gets_the_same_job(client: TestClient, world: World, answered: list[bool]) -> None:
    first, again = (submit(client, world, key="one") for _ in range(2))
    assert first.json()["id"] == again.json()["id"]
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert submit(client, world, key="one", priority=1).status_code == 422
    assert answered == [True] * 3


@pytest.mark.parametrize(("job_id", "is_usual"), [(None, True), ("job_01kg9ys7g0zn9d2mqxrybeyjtc", True), ("job_none", False)])
def test_a_job_is_shown_the_same(
    client: TestClient, world: World, answered: list[bool], monkeypatch: pytest.MonkeyPatch, job_id: str | None, is_usual: bool
) -> None:
    started_id, _ = world.start()
    first = client.get(f"/v1/jobs/{job_id or started_id}")
    assert answered == [is_usual]
    without_shortcuts(monkeypatch)
    again = client.get(f"/v1/jobs/{job_id or started_id}")
    assert (first.status_code, first.content, first.headers) == (again.status_code, again.content, again.headers)


PAGES = {
    "": True,
    "?limit=1": True,
    "?limit=1&after=job_7zzzzzzzzzzzzzzzzzzzzzzzzz": True,
    "?limit=0": False,
    "?limit=101": False,
    "?limit=1&limit=2": False,
    "?after=job_none": False,
    "?state=queued": False,
    "?unknown=1": False,
}


@pytest.mark.parametrize("query", cases(PAGES, "?limit=1", "?limit=0"))
def test_a_page_is_shown_the_same(
    client: TestClient, world: World, answered: list[bool], monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    world.start()
    world.submit()
    first = client.get(f"/v1/jobs{query}")
    assert answered == [PAGES[query]]
    without_shortcuts(monkeypatch)
    again = client.get(f"/v1/jobs{query}")
    assert (first.status_code, first.content, first.headers) == (again.status_code, again.content, again.headers)


def test_jobs_are_rendered_as_pydantic_renders_them(client: TestClient, world: World) -> None:
    running_id, rank = world.start(labels={"a": 'a "quoted" ü'})
    rank.send(step(1), step(2))
    ids = [world.submit(), running_id]
    for job_id in ids:
        text = client.get(f"/v1/jobs/{job_id}").text
        assert text == Job.model_validate_json(text).model_dump_json()
    for query in ("", "?limit=1", "?name=none"):
        text = client.get(f"/v1/jobs{query}").text
        assert text == Page[Job].model_validate_json(text).model_dump_json()
    assert [job["id"] for job in client.get("/v1/jobs").json()["data"]] == ids


def test_a_spec_is_parsed_once_for_each_text(world: World, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "_known_spec", lru_cache(maxsize=8)(views._known_spec.__wrapped__))
    parsed = []
    read = JobSpec.read_stored
    monkeypatch.setattr(JobSpec, "read_stored", lambda stored: parsed.append(stored) or read(stored))
    for number in range(3):
        world.submit(name=f"job-{number}")
    for _ in range(2):
        assert [job["name"] for job in client.get("/v1/jobs?limit=1").json()["data"]] == ["job-2"]
    assert len(parsed) == 1
    assert [job["name"] for job in client.get("/v1/jobs").json()["data"]] == ["job-2", "job-1", "job-0"]
    assert len(parsed) == 3


def test_what_is_rendered_fast_is_what_the_contract_renders(world: World, client: TestClient) -> None:
    def read(job_id: str) -> str:
        text = client.get(f"/v1/jobs/{job_id}").text
        assert Job.model_validate_json(text).model_dump_json() == text
        assert client.get("/v1/jobs?limit=1").json()["data"] == [json.loads(text)]
        return text

    job_id, rank = world.start()
    shown = [read(job_id)]
    rank.train(1, 2)
    shown.append(read(job_id))
    rank.train(3, 4)
    rank.succeed()
    shown.append(read(job_id))
    waiting = world.submit(workers=2)
    shown.append(read(waiting))
    world.cancel(waiting)
    shown.append(read(waiting))
    assert len(set(shown)) == 5
