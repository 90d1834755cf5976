"""A role bounds the priority that its keys may ask for, by every request that sets one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from octet.api_schemas.keys import KeyRole
from octet.api_schemas.quotas import HIGHEST_PRIORITY, NORMAL_PRIORITY, Quotas
from octet.service.app import create_app
from octet.service.jobs.check_processes import CheckProcesses
from octet.service.settings import Settings
from tests.service.conftest import POOLS
from tests.service.databases import ON_SQLITE
from tests.service.world import World

Document = dict[str, Any]
OPERATOR = {"Authorization": "Bearer the operator's own key"}
OF_FILE = {"Authorization": "Bearer the key of tenant one"}


KEYS = ("the operator's own key", "one:the key of tenant one")


@pytest.fixture
def keyed(world: World, tmp_path: Path, check_processes: CheckProcesses) -> Iterator[TestClient]:
    with serving(world, tmp_path, check_processes, Quotas(priorities={"submitter": 60, "admin": 90})) as client:
        yield client


def serving(world: World, folder: Path, checks: CheckProcesses, quotas: Quotas) -> TestClient:
    settings = Settings(data_dir=folder, pools=POOLS, api_keys=KEYS, quotas=quotas)
    return TestClient(create_app(settings, database=world.database, checks=checks), base_url="http://127.0.0.1:8000")


def key_of(client: TestClient, role: str) -> dict[str, str]:
    made = client.post("/v1/keys", json={"name": role, "role": role, "tenant": "one"}, headers=OPERATOR).json()
    return {"Authorization": f"Bearer {made['secret']}"}


def refused(answer: httpx.Response, got: int, most: int) -> None:
    """Check that a request was refused for the priority that it asked for."""
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert (error["field"].removeprefix("job."), error["got"]) == ("priority", str(got))
    assert error["allowed"] == f"at most {most} for the role of your key"


@ON_SQLITE
def test_each_role_has_its_own_bound(keyed: TestClient, spec_document: Document) -> None:
    def ask(priority: int, headers: dict[str, str], path: str = "/v1/jobs") -> httpx.Response:
        answer: httpx.Response = keyed.post(path, json=spec_document | {"priority": priority}, headers=headers)
        return answer

    for headers, most in ((OF_FILE, 60), (key_of(keyed, "submitter"), 60), (key_of(keyed, "admin"), 90)):
        assert ask(most, headers).status_code == 201
        refused(ask(most + 1, headers), most + 1, most)
        refused(ask(most + 1, headers, "/v1/jobs/validate"), most + 1, most)
    assert ask(HIGHEST_PRIORITY, OPERATOR).status_code == 201


@ON_SQLITE
def test_no_change_clone_retry_or_comparison_gets_around_it(keyed: TestClient, world: World, spec_document: Document) -> None:
    submitter, admin = key_of(keyed, "submitter"), key_of(keyed, "admin")
    path = f"/v1/jobs/{keyed.post('/v1/jobs', json=spec_document, headers=submitter).json()['id']}"
    refused(keyed.patch(path, json={"priority": 61}, headers=submitter), 61, 60)
    assert keyed.patch(path, json={"priority": 60}, headers=submitter).status_code == 200
    assert keyed.patch(path, json={"priority": 80}, headers=admin).status_code == 200
    # An admin has raised it: a submitter still changes its labels, and may not move it to another high place.
    assert keyed.patch(path, json={"priority": 80, "labels": {"team": "a"}}, headers=submitter).status_code == 200
    refused(keyed.patch(path, json={"priority": 79}, headers=submitter), 79, 60)
    refused(keyed.post(f"{path}/clone", headers=submitter), 80, 60)
    assert keyed.post(f"{path}/clone", json={"priority": 60}, headers=submitter).status_code == 201
    refused(keyed.post(f"{path}/clone", json={"priority": 100}, headers=admin), 100, 90)
    keyed.post(f"{path}/cancel", headers=submitter)
    refused(keyed.post(f"{path}/retry", headers=submitter), 80, 60)
    assert keyed.post(f"{path}/retry", headers=admin).status_code == 202
    compared = {"job": spec_document | {"priority": 61}, "vary": {"precision.level": ["bf16-amp", "O2"]}, "seeds": 2}
    refused(keyed.post("/v1/comparisons", json=compared, headers=submitter), 61, 60)
    assert keyed.post("/v1/comparisons", json=compared, headers=admin).status_code == 201


@ON_SQLITE
def test_a_repeated_request_is_the_job_that_was_accepted(
    keyed: TestClient, world: World, spec_document: Document, tmp_path: Path, check_processes: CheckProcesses
) -> None:
    """The operator may have lowered the bound meanwhile."""
    headers = key_of(keyed, "submitter") | {"Idempotency-Key": "once"}
    first = keyed.post("/v1/jobs", json=spec_document | {"priority": 60}, headers=headers)
    with serving(world, tmp_path, check_processes, Quotas(priorities={"submitter": 10})) as client:
        again = client.post("/v1/jobs", json=spec_document | {"priority": 60}, headers=headers)
        assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])
        refused(client.post("/v1/jobs", json=spec_document, headers=OF_FILE), 50, 10)


@ON_SQLITE
def test_the_owner_of_a_server_without_keys_asks_for_any(client: TestClient, spec_document: Document) -> None:
    assert client.post("/v1/jobs", json=spec_document | {"priority": HIGHEST_PRIORITY}).status_code == 201


@given(st.dictionaries(st.sampled_from(["submitter", "admin"]), st.integers(0, HIGHEST_PRIORITY)))
def test_a_role_has_what_is_stated_or_else_its_default(priorities: dict[Any, int]) -> None:
    quotas = Quotas(priorities=priorities)
    assert quotas.most_priority(KeyRole.ADMIN) == priorities.get("admin", HIGHEST_PRIORITY)
    assert quotas.most_priority(KeyRole.SUBMITTER) == priorities.get("submitter", NORMAL_PRIORITY)


def test_a_wrong_quotas_file_is_refused_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "quotas.yaml"
    path.write_text("priorities: {submiter: 50, admin: 101}\n")
    with pytest.raises(ValueError, match=r"priorities.submiter.*'submitter' or 'admin'.*priorities.admin.*100"):
        Settings(data_dir=tmp_path, quotas_file=path)
    path.write_text("")
    assert Settings(data_dir=tmp_path, quotas_file=path).quotas == Quotas()
    path.write_text("priorities: {submitter: 70}\n")
    assert Settings(data_dir=tmp_path, quotas_file=path).quotas.most_priority(KeyRole.SUBMITTER) == 70
