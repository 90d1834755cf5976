"""The audit has each request that was to change something, and each that was refused for its key; with whom it came from."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import EventReport, FinishedReport
from octet.service.access.audit import MOST_REFUSALS_PER_MINUTE
from octet.service.app import create_app
from octet.service.settings import Settings
from tests.service.databases import ON_SQLITE
from tests.service.world import World, step

OPERATOR = {"Authorization": "Bearer the operator's own key"}
TENANT = {"Authorization": "Bearer the key of tenant one"}
Document = dict[str, Any]


@pytest.fixture
def keyed(world: World, tmp_path: Path) -> Iterator[TestClient]:
    settings = Settings(data_dir=tmp_path, api_keys=("the operator's own key", "one:the key of tenant one"))
    app = create_app(settings, database=world.database)
    with TestClient(app, base_url="http://127.0.0.1:8000", client=("192.0.2.7", 4711)) as client:
        yield client


def audit(client: TestClient, headers: dict[str, str] = OPERATOR, query: str = "") -> list[Document]:
    """Read the audit, newest first."""
    answer = client.get(f"/v1/audit{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    found: list[Document] = answer.json()["data"]
    return found


async def _drain(client: TestClient) -> None:
    client.app.state.audit.drain()


@ON_SQLITE
def test_a_change_is_recorded_with_who_what_where_and_how_it_ended(
    keyed: TestClient, world: World, spec_document: Document
) -> None:
    job = keyed.post("/v1/jobs", json=spec_document, headers=TENANT | {"X-Request-ID": "from-a-proxy"})
    assert job.headers["x-request-id"] == "from-a-proxy"
    refused = keyed.post("/v1/jobs", json={"name": 1}, headers=TENANT)
    key = keyed.post("/v1/keys", json={"name": "ada", "role": "submitter", "tenant": "one"}, headers=OPERATOR).json()
    path = f"/v1/jobs/{job.json()['id']}/cancel"
    cancelled = keyed.post(path, headers={"Authorization": f"Bearer {key['secret']}"})
    newest, made, wrong, submitted = audit(keyed)
    assert newest | {"id": "", "at": ""} == {
        "object": "audit_record",
        "id": "",
        "at": "",
        "actor": f"ada ({key['id']})",
        "tenant": "one",
        "method": "POST",
        "path": path,
        "address": "192.0.2.7",
        "request_id": cancelled.headers["x-request-id"],
        "status": 202,
    }
    assert (made["actor"], made["tenant"], made["path"]) == ("the operator's key", "default", "/v1/keys")
    assert (wrong["request_id"], wrong["status"]) == (refused.headers["x-request-id"], 422)
    assert (submitted["actor"], submitted["request_id"], submitted["status"]) == ("the key of one", "from-a-proxy", 201)
    assert submitted["at"] == world.clock.now().isoformat(timespec="microseconds").replace("+00:00", "Z")


def test_every_event_has_its_actor(keyed: TestClient, world: World, spec_document: Document) -> None:
    job_id = keyed.post("/v1/jobs", json=spec_document, headers=TENANT).json()["id"]
    world.dispatch()
    rank = world.rank_of(job_id)
    rank.begin()
    rank.send(EventReport(type="layer.demoted", message="from users' code"))
    key = keyed.post("/v1/keys", json={"name": "ada", "role": "submitter", "tenant": "one"}, headers=OPERATOR).json()
    ada = {"Authorization": f"Bearer {key['secret']}"}
    assert keyed.patch(f"/v1/jobs/{job_id}", json={"labels": {"a": "b"}}, headers=ada).status_code == 200
    assert keyed.post(f"/v1/jobs/{job_id}/cancel?save=false", headers=OPERATOR).status_code == 202
    rank.send(FinishedReport(outcome="cancelled"))
    found = keyed.get(f"/v1/jobs/{job_id}/events", headers=TENANT).json()["data"]
    assert {(event["type"], event["actor"]) for event in found} == {
        ("job.accepted", "the key of one"),
        ("job.placed", "octet"),
        ("attempt.launched", "octet"),
        ("attempt.started", "octet"),
        ("layer.demoted", "rank 0"),
        ("job.changed", f"ada ({key['id']})"),
        ("job.cancelling", "the operator's key"),
        ("attempt.cancelled", "octet"),
        ("job.cancelled", "octet"),
    }


@ON_SQLITE
def test_refused_keys_are_recorded_and_reads_are_not(keyed: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert keyed.get("/v1/jobs", headers={"Authorization": "Bearer a wrong key, long enough"}).status_code == 401
    assert "refused GET '/v1/jobs' from 192.0.2.7 for its key" in caplog.text
    assert "a wrong key" not in caplog.text
    assert keyed.get("/v1/keys", headers=TENANT).status_code == 403
    assert keyed.get("/v1/jobs", headers=TENANT).status_code == 200
    assert keyed.post("/v1/jobs/validate", json={}, headers=TENANT).status_code == 422
    found = [(record["actor"], record["method"], record["path"], record["status"]) for record in audit(keyed)]
    assert found == [("the key of one", "GET", "/v1/keys", 403), (None, "GET", "/v1/jobs", 401)]


@ON_SQLITE
def test_strangers_cannot_fill_the_audit(keyed: TestClient) -> None:
    """All refusals are counted; a minute's first ones are stored, and the changes of those with a key in any case."""
    num_refused = MOST_REFUSALS_PER_MINUTE + 20
    keyed.app.state.audit._clock_s = lambda: 0.0
    for _ in range(num_refused):
        keyed.request("x" * 1000, f"/v1/{'y' * 3000}")
    keyed.post("/v1/jobs", json={}, headers=TENANT)
    found = audit(keyed, query="?limit=1000")
    assert [record["status"] for record in found] == [422] + [401] * MOST_REFUSALS_PER_MINUTE
    assert (len(found[-1]["method"]), len(found[-1]["path"])) == (16, 1024)
    assert f"octet_refused_keys_total {num_refused}.0" in keyed.get("/metrics", headers=OPERATOR).text
    keyed.app.state.audit._clock_s = lambda: 60.0
    keyed.get("/v1/jobs")
    assert audit(keyed)[0]["status"] == 401


@ON_SQLITE
def test_an_admin_reads_the_audit_of_its_tenant(keyed: TestClient) -> None:
    made = keyed.post("/v1/keys", json={"name": "ada", "role": "admin", "tenant": "one"}, headers=OPERATOR).json()
    keyed.get("/v1/jobs")
    keyed.post("/v1/jobs", json={}, headers=TENANT)
    assert [record["tenant"] for record in audit(keyed)] == ["one", None, "default"]
    assert [record["tenant"] for record in audit(keyed, {"Authorization": f"Bearer {made['secret']}"})] == ["one"]
    pages = [audit(keyed, query="?limit=2")]
    pages.append(audit(keyed, query=f"?limit=2&after={pages[0][-1]['id']}"))
    assert [len(page) for page in pages] == [2, 1]
    assert [record["id"] for page in pages for record in page] == [record["id"] for record in audit(keyed)]


@ON_SQLITE
def test_reports_of_ranks_leave_no_record(client: TestClient, world: World) -> None:
    _, rank = world.start()
    path = f"/internal/v1/attempts/{rank.order.attempt_id}/reports"
    batch = rank.batch(step(1)).model_dump(mode="json")
    for token, status in ((rank.order.token, 200), ("wrong", 401)):
        answer = client.post(path, json=batch, headers={"Authorization": f"Bearer {token}"})
        assert (answer.status_code, "x-request-id" in answer.headers) == (status, False)
    assert audit(client) == []


@ON_SQLITE
def test_an_audit_that_cannot_be_written_is_logged(
    keyed: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("octet.service.store.audit.add", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    keyed.post("/v1/jobs", json={}, headers=TENANT)
    keyed.portal.call(_drain, keyed)
    assert "not stored in the audit: Record(actor='the key of one'" in caplog.text
    assert "the disk is gone" in caplog.text
