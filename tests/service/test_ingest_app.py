"""The application that ranks report to: over a connection as it is served, and alone behind its limits."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import uvicorn

from octet.api_schemas import JobSpec
from octet.service import store
from octet.service.access.authentication import Authentication
from octet.service.app import create_app
from octet.service.cluster.fake import FakeLauncher
from octet.service.db.engine import Database
from octet.service.http.bodies import MAX_REPORT_BYTES, MAX_STRANGER_BYTES, LimitBodies
from octet.service.ingest.app import Ingest
from octet.service.processes.connections import LimitedProtocol
from octet.service.settings import Settings
from tests.kit.waiting import LONG_S, wait_until
from tests.service.conftest import POOLS
from tests.service.databases import ON_SQLITE
from tests.service.serving import serving
from tests.service.simulation import curve
from tests.service.statements import counted
from tests.service.world import Rank, TurnedClock, World, step


class Served:
    """A server with one job that runs."""

    def __init__(self, server: uvicorn.Server, port: int, world: World, rank: Rank) -> None:
        self.server, self.world, self.rank = server, world, rank
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)

    @property
    def path(self) -> str:
        return f"/internal/v1/attempts/{self.rank.order.attempt_id}/reports"

    def body(self, *bodies: Any, **changes: Any) -> bytes:
        return json.dumps(self.rank.batch(*bodies).model_dump(mode="json") | changes).encode()

    def send(self, body: bytes, path: str = "", method: str = "POST", **headers: str) -> tuple[int, Any]:
        """Send a report; returns the answer's status and document."""
        usual = {"Content-Type": "application/json", "Authorization": f"Bearer {self.rank.order.token}"}
        self.connection.request(method, path or self.path, body, usual | headers)
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())

    def raw(self, body: bytes) -> bytes:
        """Make the bytes of a request."""
        head = f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nAuthorization: Bearer {self.rank.order.token}\r\n\r\n"
        return head.encode() + body


@pytest.fixture
def served(tmp_path: Path, database_url: str, spec_document: dict[str, Any]) -> Iterator[Served]:
    settings = Settings(data_dir=tmp_path, port=0, pools=POOLS)
    database = Database(database_url, TurnedClock())
    world = World(database, TurnedClock(), settings, FakeLauncher(POOLS), JobSpec.model_validate(spec_document))
    _, rank = world.start()
    with serving(settings, database) as (server, port):
        given = Served(server, port, world, rank)
        with closing(given.connection):
            assert given.send(given.body())[0] == 200
            yield given


@ON_SQLITE
def test_heartbeats_and_steps_are_counted_as_one_route(served: Served) -> None:
    for bodies in ((), (step(1), step(2)), (), (step(3),)):
        status, reply = served.send(served.body(*bodies))
        assert (status, reply) == (200, {"desired": "run", "lease_s": 60.0, "acknowledged_seq": served.rank.seq})
    assert curve(served.world, served.rank.order.job_id) == [1, 2, 3]
    served.connection.request("GET", "/metrics")
    text = served.connection.getresponse().read().decode()
    route = 'code="200",method="POST",route="/internal/v1/attempts/{attempt_id}/reports"'
    assert f"octet_http_request_duration_seconds_count{{{route}}} 5.0" in text


REFUSED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "another token": (401, "unauthenticated", {"Authorization": "Bearer none"}),
    "no scheme": (401, "unauthenticated", {"Authorization": "none"}),
    "another token with a body that is no JSON": (401, "unauthenticated", {"Authorization": "Bearer none", "body": b"{"}),
    "another type": (400, "invalid_json", {"Content-Type": "text/plain"}),
    "another Host": (421, "wrong_host", {"Host": "attacker.example"}),
    "a web page": (421, "wrong_host", {"Origin": "https://attacker.example"}),
    "an unknown parameter": (422, "invalid_request", {"path": "?more=1"}),
    "another method": (405, "method_not_allowed", {"method": "PUT"}),
    "no body": (422, "invalid_request", {"body": b""}),
    "half a body": (400, "invalid_json", {"body": b"{"}),
    "bytes that are no text": (400, "invalid_json", {"body": b'{"epoch": "\xff"}'}),
    "an unknown field": (422, "invalid_request", {"body": b'{"epoch": 1, "rank": 0, "more": 1}'}),
    "an old epoch": (409, "stale_attempt", {"body": b'{"epoch": 9, "rank": 0}'}),
    "too large": (413, "payload_too_large", {"body": b" " * (MAX_REPORT_BYTES + 1)}),
    "large and of a stranger": (
        401,
        "unauthenticated",
        {"body": b" " * (MAX_STRANGER_BYTES + 1), "Authorization": "Bearer none"},
    ),
}


@ON_SQLITE
def test_a_refusal_is_a_problem_document(served: Served) -> None:
    answers = {}
    for name, (_, _, refused) in REFUSED.items():
        changes = dict(refused)
        path = served.path + changes.pop("path", "")
        status, problem = served.send(changes.pop("body", served.body()), path, **changes)
        answers[name] = (status, problem["code"], problem["instance"])
    assert answers == {name: (status, code, served.path) for name, (status, code, _) in REFUSED.items()}


@ON_SQLITE
def test_a_field_that_is_wrong_is_named(served: Served) -> None:
    body = json.loads(served.body(step(1)))
    body["reports"][0]["body"]["tokens"] = -1
    status, problem = served.send(json.dumps(body).encode())
    assert status == 422
    assert [(each["field"], each["got"]) for each in problem["errors"]] == [("reports.0.body.step.tokens", "-1")]


@ON_SQLITE
def test_a_large_batch_of_a_known_rank_is_read(served: Served) -> None:
    body = served.body(*[step(number) for number in range(1, 1001)])
    assert len(body) > MAX_STRANGER_BYTES
    assert served.send(body)[0] == 200
    assert curve(served.world, served.rank.order.job_id) == list(range(1, 1001))


@ON_SQLITE
def test_a_body_may_come_in_pieces(served: Served) -> None:
    request = served.raw(served.body(step(1)))
    sock = served.connection.sock
    for begin in range(0, len(request), 100):
        sock.sendall(request[begin : begin + 100])
    assert sock.recv(65_536).startswith(b"HTTP/1.1 200 ")
    assert curve(served.world, served.rank.order.job_id) == [1]


@ON_SQLITE
def test_a_body_that_does_not_come_has_a_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = served.server.config.http_protocol_class
    assert issubclass(protocol, LimitedProtocol)
    monkeypatch.setattr(protocol.listeners.api, "body_timeout_s", 0.1)
    sock = served.connection.sock
    sock.sendall(served.raw(served.body(step(1)))[:-1])
    assert sock.recv(65_536).startswith(b"HTTP/1.1 408 ")
    assert sock.recv(65_536) == b""


@ON_SQLITE
def test_requests_on_one_connection_are_answered_in_order(served: Served) -> None:
    first, last = served.body(step(1)), served.body(step(2))
    health = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    sock = served.connection.sock
    sock.sendall(served.raw(first) + health + served.raw(last))
    received = b""
    while received.count(b"HTTP/1.1 200 OK") < 3 or not received.endswith(b"}"):
        received += sock.recv(65_536)
    marks = [received.find(mark) for mark in (b'"acknowledged_seq":2', b"ok", b'"acknowledged_seq":3')]
    assert marks == sorted(marks)
    assert -1 not in marks


@ON_SQLITE
def test_a_server_that_stops_answers_what_it_took(served: Served) -> None:
    body = served.body(step(1))
    with served.world.database.write() as session:  # the report waits for its turn to write
        store.jobs.lock_attempt(session, served.rank.order.attempt_id)
        served.connection.sock.sendall(served.raw(body))
        wait_until(lambda: any(each.cycle and not each.cycle.response_complete for each in connections(served)))
        served.server.should_exit = True
        wait_until(lambda: any(not each.cycle.keep_alive for each in connections(served)))
    answer = served.connection.sock.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer
    assert curve(served.world, served.rank.order.job_id) == [1]


def connections(served: Served) -> list[Any]:
    return list(served.server.server_state.connections)


@ON_SQLITE
def test_a_heartbeat_of_a_known_rank_takes_two_statements(served: Served) -> None:
    with counted(served.world) as counts:
        assert served.send(served.body())[0] == 200
    assert counts == {"statements": 2 + (not served.world.database.is_sqlite), "commits": 1}


@ON_SQLITE
def test_the_application_is_complete_without_fastapi(world: World) -> None:
    """Behind its limits alone, as on a listener of its own, it gives the same answers."""
    _, rank = world.start()
    ingest: Ingest = create_app(world.settings, database=world.database).state.ingest
    authenticate = Authentication(world.settings, world.database).authenticate
    alone = LimitBodies(ingest, authenticate=authenticate, verify_token=ingest.tokens.verify)
    path, batch = f"/internal/v1/attempts/{rank.order.attempt_id}/reports", rank.batch(step(1)).model_dump(mode="json")
    known = {"Authorization": f"Bearer {rank.order.token}"}

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app=alone)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return [
                (await client.post(path, json=batch, headers=known)).status_code,
                (await client.post(path, json=batch | {"more": 1}, headers=known)).status_code,
                (await client.post(path, json=batch)).status_code,
                (await client.put(path, json=batch, headers=known)).status_code,
                (await client.post("/elsewhere", json=batch, headers=known)).status_code,
            ]

    assert anyio.run(ask) == [200, 422, 401, 405, 404]
