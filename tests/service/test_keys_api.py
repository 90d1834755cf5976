"""Keys of the database: what each role may do, and that one which expires, is rotated or revoked ends in time."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text
from starlette.types import Message

from octet.service.app import create_app
from octet.service.settings import Settings
from tests.client.octet_app import API_KEY, OctetApp
from tests.kit.waiting import LONG_S, wait_until
from tests.service.databases import ON_SQLITE
from tests.service.test_checkpoint_files import write_checkpoint
from tests.service.test_exports_api import write_export
from tests.service.world import World, step

OPERATOR = {"Authorization": "Bearer the operator's own key"}
Document = dict[str, Any]


@pytest.fixture
def keyed(world: World, tmp_path: Path) -> Iterator[TestClient]:
    keys = ("the operator's own key", "one:the key of tenant one", "prometheus:the key of prometheus")
    settings = Settings(data_dir=tmp_path, api_keys=keys)
    with TestClient(create_app(settings, database=world.database), base_url="http://127.0.0.1:8000") as client:
        yield client


def make(client: TestClient, role: str = "viewer", tenant: str = "one", **more: Any) -> Document:
    answer = client.post("/v1/keys", json={"name": "ada", "role": role, "tenant": tenant, **more}, headers=OPERATOR)
    assert answer.status_code == 201, answer.text
    made: Document = answer.json()
    return made


def bearer(key: Document) -> dict[str, str]:
    return {"Authorization": f"Bearer {key['secret']}"}


def test_a_secret_is_shown_once_and_stored_as_its_hash(keyed: TestClient, world: World) -> None:
    made = make(keyed)
    assert len(made["secret"]) == len("octet_") + 43  # 256 bits in base 64
    listed = keyed.get("/v1/keys", headers=OPERATOR).json()["data"]
    assert listed == [{name: value for name, value in made.items() if name != "secret"}]
    with world.database.read() as session:
        (row,) = session.execute(text("SELECT * FROM api_keys")).all()
    assert made["secret"] not in str(row)


@ON_SQLITE
@pytest.mark.parametrize(
    ("role", "reads", "changes", "scrapes", "administers"),
    [
        ("viewer", 200, 403, 403, 403),
        ("submitter", 200, 201, 403, 403),
        ("admin", 200, 201, 403, 200),
        ("scraper", 403, 403, 200, 403),
    ],
)
def test_a_role_may_do_what_it_says(
    keyed: TestClient, spec_document: Document, role: str, reads: int, changes: int, scrapes: int, administers: int
) -> None:
    headers = bearer(make(keyed, role))
    asked = [
        keyed.get("/v1/jobs", headers=headers),
        keyed.post("/v1/jobs", json=spec_document, headers=headers),
        keyed.get("/metrics", headers=headers),
        keyed.get("/v1/keys", headers=headers),
    ]
    assert [answer.status_code for answer in asked] == [reads, changes, scrapes, administers]
    for answer in asked:
        if answer.status_code == 403:
            assert answer.json()["code"] == "forbidden"
            assert "use one with a role that may" in answer.json()["detail"]


@ON_SQLITE
def test_keys_of_the_file(keyed: TestClient, spec_document: Document) -> None:
    """Series of all tenants are for the operator and for Prometheus, whose key sees no job."""
    named = {"Authorization": "Bearer the key of tenant one"}
    scraper = {"Authorization": "Bearer the key of prometheus"}
    for headers, submits, scrapes, manages in ((OPERATOR, 201, 200, 200), (named, 201, 403, 403), (scraper, 403, 200, 403)):
        assert keyed.post("/v1/jobs", json=spec_document, headers=headers).status_code == submits
        assert keyed.get("/metrics", headers=headers).status_code == scrapes
        assert keyed.get("/internal/v1/prometheus/targets", headers=headers).status_code == scrapes
        assert keyed.get("/v1/keys", headers=headers).status_code == manages
    assert keyed.get("/v1/jobs", headers=scraper).status_code == 403
    assert len(keyed.get("/v1/jobs", headers=named).json()["data"]) == 1
    assert len(keyed.get("/v1/jobs", headers=OPERATOR).json()["data"]) == 2


@ON_SQLITE
def test_without_configured_keys_a_key_counts_and_loopback_stays_the_operator(client: TestClient) -> None:
    made = client.post("/v1/keys", json={"name": "ada", "role": "viewer", "tenant": "one"}).json()
    assert client.post("/v1/jobs/validate", json={}, headers=bearer(made)).status_code == 403
    assert client.post("/v1/keys/" + made["id"] + "/revoke").status_code == 200
    assert client.get("/v1/jobs", headers=bearer(made)).status_code == 401
    assert client.get("/v1/jobs", headers={"Authorization": "Bearer of another server"}).status_code == 200
    assert client.get("/v1/jobs").status_code == 200


@ON_SQLITE
def test_an_admin_manages_the_keys_of_its_own_tenant(keyed: TestClient) -> None:
    admin, other = bearer(make(keyed, "admin")), make(keyed, tenant="two")
    for action in ("revoke", "rotate"):
        assert keyed.post(f"/v1/keys/{other['id']}/{action}", headers=admin).status_code == 404
    refused = keyed.post("/v1/keys", json={"name": "eve", "role": "admin", "tenant": "default"}, headers=admin)
    assert (refused.status_code, refused.json()["errors"][0]["allowed"]) == (422, "one")
    scraper = make(keyed, "scraper")
    for path, body in (("/v1/keys", {"name": "eve", "role": "scraper"}), (f"/v1/keys/{scraper['id']}/rotate", {})):
        refused = keyed.post(path, json=body, headers=admin)
        assert (refused.status_code, "metrics of all tenants" in refused.json()["detail"]) == (403, True), (
            "it would see others' jobs"
        )
    assert keyed.post(f"/v1/keys/{scraper['id']}/revoke", headers=admin).status_code == 200
    own = keyed.post("/v1/keys", json={"name": "bob", "role": "viewer"}, headers=admin).json()
    assert (own["tenant"], own["created_by"].partition(" ")[0]) == ("one", "ada")
    assert {key["tenant"] for key in keyed.get("/v1/keys", headers=admin).json()["data"]} == {"one"}
    assert {key["tenant"] for key in keyed.get("/v1/keys", headers=OPERATOR).json()["data"]} == {"one", "two"}


@ON_SQLITE
def test_only_an_admin_of_the_default_tenant_sees_all(keyed: TestClient, spec_document: Document) -> None:
    assert keyed.post("/v1/jobs", json=spec_document, headers=bearer(make(keyed, "submitter"))).json()["tenant"] == "one"
    for role, count in (("viewer", 0), ("submitter", 0), ("admin", 1)):
        found = keyed.get("/v1/rows", headers=bearer(make(keyed, role, "default"))).json()
        assert found["total"] == count, role


def test_a_key_ends_when_it_expires_and_a_rotated_one_after_its_overlap(keyed: TestClient, world: World) -> None:
    old = make(keyed, expires_in_s=3600)
    new = keyed.post(f"/v1/keys/{old['id']}/rotate", json={"overlap_s": 60}, headers=OPERATOR).json()
    assert [new[name] for name in ("name", "role", "tenant")] == ["ada", "viewer", "one"]
    statuses = []
    for seconds in (0, 59, 2, 3600):
        world.clock.turn(seconds)
        keyed.app.state.context.authentication.forget()  # its half second does not pass by this clock
        statuses.append([keyed.get("/v1/jobs", headers=bearer(key)).status_code for key in (old, new)])
    assert statuses == [[200, 200], [200, 200], [401, 200], [401, 401]]
    again = keyed.post(f"/v1/keys/{old['id']}/rotate", headers=OPERATOR)
    assert (again.status_code, again.json()["code"]) == (409, "illegal_transition")


def test_of_two_admins_who_rotate_a_key_at_once_one_is_named_the_other_s(keyed: TestClient) -> None:
    """A second one would be made for as long as the first one's overlap lasts."""
    old = make(keyed)
    with ThreadPoolExecutor(8) as admins:
        rotate = f"/v1/keys/{old['id']}/rotate"
        answers = [answer.result() for answer in [admins.submit(keyed.post, rotate, headers=OPERATOR) for _ in range(8)]]
    (made,) = [answer.json() for answer in answers if answer.status_code == 201]
    assert [answer.status_code for answer in answers].count(409) == 7
    assert all(made["id"] in answer.json()["detail"] for answer in answers if answer.status_code == 409)
    assert made["expires_at"] is None
    listed = {key["id"]: key["replaced_by"] for key in keyed.get("/v1/keys", headers=OPERATOR).json()["data"]}
    assert listed == {old["id"]: made["id"], made["id"]: None}


@ON_SQLITE
def test_the_last_use_is_written_once_a_minute(keyed: TestClient, world: World) -> None:
    key = make(keyed)

    def used_at() -> str | None:
        return keyed.get("/v1/keys", headers=OPERATOR).json()["data"][0]["used_at"]

    def use() -> None:
        keyed.app.state.context.authentication.forget()
        assert keyed.get("/v1/jobs", headers=bearer(key)).status_code == 200

    use()
    wait_until(lambda: used_at() is not None)
    first = used_at()
    world.clock.turn(59)
    use()
    world.clock.turn(1)
    use()
    wait_until(lambda: used_at() != first)
    assert used_at() == world.clock.now().isoformat(timespec="microseconds").replace("+00:00", "Z")


def test_a_key_that_another_process_revokes_is_refused_within_a_second(world: World, keyed: TestClient, tmp_path: Path) -> None:
    """By the clock that keys are remembered by: the other process's memory is a second application over the database."""
    key, moment_s = make(keyed), [0.0]
    app = create_app(Settings(data_dir=tmp_path, api_keys=("the operator's own key",)), database=world.database)
    app.state.context.authentication._clock_s = lambda: moment_s[0]
    with TestClient(app, base_url="http://127.0.0.1:8000") as other:
        assert other.get("/v1/jobs", headers=bearer(key)).status_code == 200
        assert keyed.post(f"/v1/keys/{key['id']}/revoke", headers=OPERATOR).status_code == 200
        assert keyed.get("/v1/jobs", headers=bearer(key)).status_code == 401
        moment_s[0] = 0.99
        for method in ("GET", "POST"):
            assert other.request(method, "/v1/jobs", headers=bearer(key)).status_code == 401


@ON_SQLITE
def test_a_remembered_key_needs_no_query(keyed: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    key, authentication = make(keyed), keyed.app.state.context.authentication
    authentication._clock_s = lambda: 0.0
    looked_up = []
    found = authentication._look_up
    monkeypatch.setattr(authentication, "_look_up", lambda key_hash: looked_up.append(key_hash) or found(key_hash))
    for _ in range(5):
        assert keyed.post("/v1/jobs", json={}, headers=bearer(key)).status_code == 403
    assert len(looked_up) == 1


def test_a_stream_ends_when_its_key_is_revoked(tmp_path: Path) -> None:
    with OctetApp(tmp_path / "data", api_keys=(API_KEY,)) as app:
        operator = httpx.Client(base_url=app.url, headers={"Authorization": f"Bearer {API_KEY}"}, trust_env=False)
        key = operator.post("/v1/keys", json={"name": "ada", "role": "viewer", "tenant": "one"}).json()
        with httpx.stream("GET", f"{app.url}/v1/stream?rows=limit%3D5", headers=bearer(key), trust_env=False) as stream:
            lines = stream.iter_lines()
            assert next(lines) == ": here"
            revoking = threading.Thread(target=operator.post, args=(f"/v1/keys/{key['id']}/revoke",))
            revoking.start()
            rest = list(lines)  # ends with the stream
            revoking.join()
            assert ": still here" not in rest, "it ended by the revocation, before it had been silent for a while"
        operator.close()


@ON_SQLITE
@pytest.mark.parametrize("what", ["checkpoints/{}/files/tensors.safetensors", "exports/{}/archive"])
def test_a_download_ends_when_its_key_is_revoked(keyed: TestClient, world: World, spec_document: Document, what: str) -> None:
    """Its client reads nothing, so it would last until the server gives the client up."""
    key = make(keyed)
    job_id = keyed.post("/v1/jobs", json=spec_document, headers={"Authorization": "Bearer the key of tenant one"}).json()["id"]
    world.dispatch()
    rank = world.rank_of(job_id)
    rank.begin()
    saved = {"checkpoints": write_checkpoint(world, job_id), "exports": write_export(world, job_id)}
    rank.send(step(1), step(2), *saved.values())
    path = f"/v1/jobs/{job_id}/{what.format(saved[what.partition('/')[0]].name)}"
    keyed.app.state.context.settings.__dict__["data_dir"] = world.settings.data_dir
    sent: list[str] = []

    async def download() -> None:
        begun = asyncio.Event()

        async def send(message: Message) -> None:
            sent.append(message["type"])
            if message["type"] == "http.response.body":
                begun.set()
                await asyncio.Event().wait()

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        head = [(b"host", b"127.0.0.1"), (b"authorization", bearer(key)["Authorization"].encode())]
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http"}
        scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": head, "client": ("192.0.2.7", 1)}
        sending = asyncio.create_task(keyed.app(scope | {"server": ("127.0.0.1", 8000)}, receive, send))
        async with asyncio.timeout(LONG_S):
            await begun.wait()
            await asyncio.to_thread(keyed.post, f"/v1/keys/{key['id']}/revoke", headers=OPERATOR)
            await sending

    asyncio.run(download())
    assert sent == ["http.response.start", "http.response.body"]
