"""`POST /v1/jobs/batch`: all jobs are stored, or none, and each once."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas.job_batch import MAX_JOBS, SWEEP, sweep
from tests.service.databases import ON_SQLITE
from tests.service.invariants import check_invariants
from tests.service.test_jobs_api import problem_of
from tests.service.world import World

PATH = "/v1/jobs/batch"
RATES = {"training.optimizer.learning_rate": [1e-4, 3e-4], "training.seed": [1, 2, 3]}


def listed(client: TestClient) -> list[str]:
    return [job["id"] for job in client.get("/v1/jobs?limit=100").json()["data"]]


def test_a_sweep_is_stored_in_its_order(client: TestClient, world: World, spec_document: dict[str, Any]) -> None:
    answer = client.post(PATH, json={"job": spec_document, "changes": sweep(RATES)})
    assert answer.status_code == 201
    specs = [job["spec"] for job in answer.json()["jobs"]]
    found = [(spec["training"]["optimizer"]["learning_rate"], spec["training"]["seed"]) for spec in specs]
    assert found == [(rate, seed) for rate in (1e-4, 3e-4) for seed in (1, 2, 3)]
    assert specs[4]["labels"] == {SWEEP: "learning_rate=0.0003, seed=2"}
    assert listed(client) == [job["id"] for job in answer.json()["jobs"]][::-1]
    world.dispatch()
    check_invariants(world)


@ON_SQLITE
def test_defaults_follow_what_a_change_sets(client: TestClient, spec_document: dict[str, Any]) -> None:
    changes = [{"precision": {"level": "O2", "recipe": {"granularity": kind}}} for kind in ("tensor", "mx")]
    answer = client.post(PATH, json={"job": spec_document, "changes": changes})
    recipes = [job["spec"]["precision"]["recipe"] for job in answer.json()["jobs"]]
    assert [recipe["granularity"] for recipe in recipes] == ["tensor", "mx"]


@ON_SQLITE
def test_one_that_is_refused_stores_none_and_is_named(client: TestClient, spec_document: dict[str, Any]) -> None:
    for change, field in (
        ({"training": {"steps": -1}}, "changes.1.training.steps"),
        ({"data": {"path": "/nowhere"}}, "changes.1.data.path"),
        ({"resources": {"pool": "none"}}, "changes.1.resources.pool"),
    ):
        body = {"job": spec_document, "changes": [{}, change]}
        assert problem_of(client.post(PATH, json=body), 422).errors[0].field == field
    assert listed(client) == []


@ON_SQLITE
@pytest.mark.parametrize("changes", [[], [{}] * (MAX_JOBS + 1), [[]], None])
def test_a_batch_has_one_to_a_hundred_changes(client: TestClient, spec_document: dict[str, Any], changes: Any) -> None:
    assert (
        problem_of(client.post(PATH, json={"job": spec_document, "changes": changes}), 422)
        .errors[0]
        .field.startswith("changes")
    )


def test_a_key_gives_the_same_jobs_again_and_no_others(client: TestClient, spec_document: dict[str, Any]) -> None:
    headers, body = {"Idempotency-Key": "sweep-1"}, {"job": spec_document, "changes": sweep(RATES)}
    first = client.post(PATH, json=body, headers=headers)
    again = client.post(PATH, json=body, headers=headers)
    ids = [[job["id"] for job in answer.json()["jobs"]] for answer in (first, again)]
    assert ids[0] == ids[1]
    assert ("Idempotent-Replayed" in first.headers, again.headers["Idempotent-Replayed"]) == (False, "true")
    assert listed(client) == ids[0][::-1]
    other = {"job": spec_document, "changes": [*sweep(RATES), {"training": {"seed": 9}}]}
    other["changes"][0] = {"training": {"seed": 8}}
    problem_of(client.post(PATH, json=other, headers=headers), 422)
    assert listed(client) == ids[0][::-1], "the new one of a batch whose key is taken is not stored either"
