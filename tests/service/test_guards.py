"""Keys and the Host header keep strangers out, and every route has one of them."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.types import Receive, Scope, Send

from octet.api_schemas import ErrorCode
from octet.service.app import create_app
from octet.service.db.engine import Database
from octet.service.http.guards import USER
from octet.service.settings import Settings

KEY = "a key that is long enough"
OPEN_TO_ALL = {"/healthz", "/readyz", "/openapi.json", "/v1/sign-in"}

MakeClient = Callable[..., TestClient]


@pytest.fixture
def make_client(sqlite_template: Path, tmp_path: Path, openapi_document: dict[str, Any]) -> Iterator[MakeClient]:
    database = Database(f"sqlite:///{shutil.copy(sqlite_template, tmp_path / 'octet.db')}")

    def make(base_url: str = "http://127.0.0.1", **settings: Any) -> TestClient:
        app = create_app(Settings(data_dir=tmp_path, **settings), database=database)
        app.openapi_schema = openapi_document
        return TestClient(app, base_url=base_url, raise_server_exceptions=False)

    yield make
    database.close()


def test_without_keys_only_this_machine_is_served(make_client: MakeClient) -> None:
    client = make_client()
    for host in ("127.0.0.1", "127.0.0.1:8000", "127.9.9.9", "localhost", "LOCALHOST:8000", "[::1]", "[::1]:8000"):
        assert client.get("/v1/levels", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "", "192.0.2.1", "0.0.0.0"):
        response = client.get("/v1/levels", headers={"Host": host})
        assert (response.status_code, response.json()["code"]) == (421, ErrorCode.WRONG_HOST), host


@pytest.mark.parametrize(("user", "status"), [(0, 200), (os.geteuid(), 200), (os.geteuid() + 1, 401), (None, 401)])
def test_without_keys_only_the_server_s_user_and_root_are_served(
    make_client: MakeClient, user: int | None, status: int
) -> None:
    client = make_client()
    app = client.app

    async def asked_by_the_user(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope | {"extensions": {USER: {"id": user}}}, receive, send)

    client = TestClient(asked_by_the_user, base_url="http://127.0.0.1")
    assert client.get("/v1/levels").status_code == status
    assert client.post("/v1/jobs", json={}).status_code == (status if status == 401 else 422)


def test_without_keys_a_web_page_of_another_site_is_not_served(make_client: MakeClient) -> None:
    client = make_client()
    cancel = "/v1/jobs/job_01kg9ys7g0zn9d2mqxrybeyjtc/cancel"
    for origin in ("http://127.0.0.1:8000", "http://localhost:3000", "https://[::1]"):
        assert client.post(cancel, headers={"Origin": origin}).status_code == 404, origin
    for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example", ""):
        assert client.post(cancel, headers={"Origin": origin}).status_code == 421, origin


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_json_that_does_not_say_so_is_not_read(make_client: MakeClient, content_type: str | None) -> None:
    """A browser sends such bodies to other sites without asking those sites first."""
    headers = {"Content-Type": content_type} if content_type else {}
    response = make_client().post("/v1/jobs", content=b"{}", headers=headers)
    assert (response.status_code, response.json()["code"]) == (400, ErrorCode.INVALID_JSON)


def test_with_keys_any_host_and_a_known_key(make_client: MakeClient) -> None:
    client = make_client(base_url="http://octet.example", host="0.0.0.0", api_keys=(KEY, KEY + "2"), data_roots=("/data",))
    assert client.get("/v1/levels").status_code == 401
    assert client.get("/v1/levels").json()["code"] == ErrorCode.UNAUTHENTICATED
    for wrong in ("wrong", KEY[:-1], ""):
        assert client.get("/v1/levels", headers={"Authorization": f"Bearer {wrong}"}).status_code == 401
    assert client.get("/v1/levels", headers={"Authorization": f"Basic {KEY}"}).status_code == 401
    for right in (KEY, KEY + "2"):
        assert client.get("/v1/levels", headers={"Authorization": f"Bearer {right}"}).status_code == 200


def test_every_route_but_four_needs_a_key_or_an_attempts_token(
    make_client: MakeClient, openapi_document: dict[str, Any]
) -> None:
    client = make_client(base_url="http://octet.example", host="0.0.0.0", api_keys=(KEY,), data_roots=("/data",))
    app = client.app
    assert isinstance(app, FastAPI)
    tried = 0
    for path, operations in openapi_document["paths"].items():
        for method in operations:
            response = client.request(method, path.replace("{job_id}", "job_01kg9ys7g0zn9d2mqxrybeyjtc"))
            assert (response.status_code == 401) == (path not in OPEN_TO_ALL), (method, path, response.text)
            tried += 1
    assert tried >= 15


def test_a_bug_of_ours_is_a_problem_without_a_trace(make_client: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    client = make_client()
    app = client.app
    assert isinstance(app, FastAPI)

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("a secret of the inside")

    app.openapi_schema = None
    response = client.get("/broken")
    assert (response.status_code, response.json()["code"]) == (500, ErrorCode.INTERNAL)
    assert "secret" not in response.text
    assert "a secret of the inside" in caplog.text


def test_a_database_that_is_away_is_503(tmp_path: Path, openapi_document: dict[str, Any]) -> None:
    database = Database(f"sqlite:///{tmp_path}/no/such/folder/octet.db")
    app = create_app(Settings(data_dir=tmp_path), database=database)
    app.openapi_schema = openapi_document
    client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    for path in ("/readyz", "/v1/jobs", "/metrics"):
        response = client.get(path)
        assert (response.status_code, response.json()["code"]) == (503, ErrorCode.NOT_READY), path
        assert response.headers["retry-after"]
    assert client.get("/healthz").status_code == 200
    database.close()
