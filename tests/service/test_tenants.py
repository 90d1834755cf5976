"""A key with a tenant's name reaches that tenant's jobs and no other's, by any route of a job that the API has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.service.app import create_app
from octet.service.settings import Settings
from tests.service.databases import ON_SQLITE
from tests.service.world import World

KEYS = {name: f"the api key of {name} here" for name in ("one", "two", "")}
_UNKNOWN = "job_01kg9ys7g0zcz3435ebr0e41d0"
_FILLED = {"name": "step_0000000001", "path": "model.safetensors"}


@pytest.fixture
def keyed(world: World, tmp_path: Path) -> Iterator[TestClient]:
    keys = tuple(f"{name}:{key}" if name else key for name, key in KEYS.items())
    app = create_app(Settings(data_dir=tmp_path, api_keys=keys), database=world.database)
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield client


def as_tenant(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def ask(client: TestClient, method: str, path: str, name: str) -> tuple[int, str]:
    answer = client.request(method, path, headers=as_tenant(name), json={} if method == "PATCH" else None)
    return answer.status_code, answer.json().get("code", "")


@ON_SQLITE
def test_another_tenants_job_is_404_on_every_route(
    keyed: TestClient, world: World, openapi_document: dict[str, Any], spec_document: dict[str, Any]
) -> None:
    """The routes come from the OpenAPI document: one that is added is asked too."""
    job_id = keyed.post("/v1/jobs", json=spec_document, headers=as_tenant("one")).json()["id"]
    routes = [
        (method.upper(), path.format(job_id="{job_id}", **_FILLED))
        for path, operations in openapi_document["paths"].items()
        for method in operations
        if "{job_id}" in path
    ]
    assert len(routes) >= 16
    for method, path in routes:
        asked = ask(keyed, method, path.format(job_id=job_id), "two")
        assert asked == ask(keyed, method, path.format(job_id=_UNKNOWN), "two") == (404, "not_found"), path
    for part in ("points", "events", "logs"):
        assert ask(keyed, "GET", f"/v1/stream?{part}={job_id}", "two") == (404, "not_found")
    for name in ("one", ""):
        assert keyed.get(f"/v1/jobs/{job_id}", headers=as_tenant(name)).json()["tenant"] == "one"
    assert keyed.post(f"/v1/jobs/{job_id}/cancel", headers=as_tenant("one")).status_code == 202


@ON_SQLITE
def test_lists_have_a_tenants_own_jobs(keyed: TestClient, spec_document: dict[str, Any]) -> None:
    for name in ("one", "two", "two"):
        assert keyed.post("/v1/jobs", json=spec_document, headers=as_tenant(name)).status_code == 201
    for name, count in (("one", 1), ("two", 2), ("", 3)):
        page = keyed.get("/v1/rows", headers=as_tenant(name)).json()
        assert (page["total"], len(page["data"])) == (count, count)
        assert len(keyed.get("/v1/jobs", headers=as_tenant(name)).json()["data"]) == count
    assert keyed.get("/v1/rows?tenant=two", headers=as_tenant("")).json()["total"] == 2
    refused = keyed.get("/v1/rows?tenant=two", headers=as_tenant("one"))
    assert (refused.status_code, refused.json()["errors"][0]["allowed"]) == (422, "one")
    refused = keyed.get("/v1/stream?rows=tenant%3Dtwo", headers=as_tenant("one"))
    assert refused.status_code == 422
