"""Jobs are rendered as their contract renders them, and what is known of one is parsed once."""

import json
from functools import lru_cache
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import Job, JobSpec, Page
from octet.service.jobs import views
from tests.service.databases import ON_SQLITE
from tests.service.world import World, step


@ON_SQLITE
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


@ON_SQLITE
def test_a_spec_is_parsed_once_for_each_text(world: World, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "_parsed", lru_cache(maxsize=8)(views._parsed.__wrapped__))
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


@ON_SQLITE
def test_what_is_not_checked_again_is_what_the_contract_renders(world: World, client: TestClient) -> None:
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


@ON_SQLITE
def test_every_route_shows_a_job_in_the_same_bytes(client: TestClient, spec_document: dict[str, Any]) -> None:
    spec_document["training"]["optimizer"] = {"name": "adamw", "learning_rate": 1.5e-7}
    spec_document["labels"] = {"a": 'a "quoted" ü'}

    def read() -> str:
        return client.get(f"/v1/jobs/{job_id}").text

    submitted, replayed = (client.post("/v1/jobs", json=spec_document, headers={"Idempotency-Key": "a"}) for _ in range(2))
    job_id = submitted.json()["id"]
    assert submitted.text == replayed.text == read() == Job.model_validate_json(read()).model_dump_json()
    for command in ("pause", "resume", "cancel"):
        assert client.post(f"/v1/jobs/{job_id}/{command}").text == read()
    assert client.post("/v1/jobs", json=spec_document, headers={"Idempotency-Key": "a"}).text == read()
