"""Usual reports are answered before ASGI, byte by byte as the route answers them; all others reach the route."""

import hashlib
import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from sqlalchemy import text

from api_schemas import JobSpec
from service import store
from service.cluster.fake import FakeLauncher
from service.db.engine import Database
from service.processes.connections import Connections
from service.processes.direct import DirectProtocol, _Held
from service.routes.direct import DirectReports
from service.settings import Settings
from tests.service.conftest import POOLS
from tests.service.serving import serving
from tests.service.simulation import curve
from tests.service.world import Rank, TurnedClock, World, step
from tests.waiting import LONG_S, wait_until


class Served:
    """A server with one job that runs. `through_asgi` has the path of each request that came to the app."""

    def __init__(self, server: uvicorn.Server, port: int, world: World, rank: Rank, through_asgi: list[str]) -> None:
        self.server, self.world, self.rank, self.through_asgi = server, world, rank, through_asgi
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)

    @property
    def connections(self) -> Connections:
        """The limits of the server's connections."""
        protocol = self.server.config.http_protocol_class
        assert issubclass(protocol, DirectProtocol)
        return protocol.open_connections

    @property
    def path(self) -> str:
        return f"/internal/v1/attempts/{self.rank.order.attempt_id}/reports"

    def body(self, *bodies: Any, **changes: Any) -> bytes:
        return json.dumps(self.rank.batch(*bodies).model_dump(mode="json") | changes).encode()

    def send(self, body: bytes, query: str = "", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Send a report; returns the answer's status, headers and body."""
        usual = {"Content-Type": "application/json", "Authorization": f"Bearer {self.rank.order.token}"}
        self.connection.request("POST", self.path + query, body, usual | headers)
        answer = self.connection.getresponse()
        return answer.status, {**dict(answer.getheaders()), "date": ""}, answer.read()

    def forget_tokens(self) -> None:
        """Let the server ask the database about the next report's token."""
        app = self.server.config.app
        assert isinstance(app, FastAPI)
        app.state.context.reports._token_hashes.clear()

    def beat(self) -> None:
        """Send a heartbeat, which makes the token known."""
        assert self.send(self.body())[0] == 200


@pytest.fixture
def served(
    tmp_path: Path, database_url: str, spec_document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    settings = Settings(data_dir=tmp_path, port=0, pools=POOLS)
    database = Database(database_url, TurnedClock())
    world = World(database, TurnedClock(), settings, FakeLauncher(POOLS), JobSpec.model_validate(spec_document))
    _, rank = world.start()
    with serving(settings, database, monkeypatch) as (server, port, through_asgi):
        given = Served(server, port, world, rank, through_asgi)
        with closing(given.connection):
            given.beat()
            through_asgi.clear()
            yield given


def test_heartbeats_and_steps_do_not_reach_the_app(served: Served) -> None:
    for bodies in ((), (step(1), step(2)), (), (step(3),)):
        status, _, body = served.send(served.body(*bodies))
        assert (status, json.loads(body)["acknowledged_seq"]) == (200, served.rank.seq)
    assert served.through_asgi == []
    assert curve(served.world, served.rank.order.job_id) == [1, 2, 3]
    served.connection.request("GET", "/metrics")
    counted = served.connection.getresponse().read().decode()
    route = (
        'octet_http_request_duration_seconds_count{code="200",method="POST",route="/internal/v1/attempts/{attempt_id}/reports"}'
    )
    assert f"{route} 5.0" in counted


@pytest.mark.parametrize("kind", ["a heartbeat", "a gap", "an old epoch", "no such rank", "another token now"])
def test_answers_are_those_of_the_route(served: Served, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    changes = {"an old epoch": {"epoch": 9}, "no such rank": {"rank": 3}}.get(kind, {})
    served.rank.seq += 5 * (kind == "a gap")
    body = served.body(*[step(1)] * (kind == "a gap"), **changes)
    if kind == "another token now":
        with served.world.database.write() as session:
            session.execute(text("UPDATE attempts SET token_hash = :hash"), {"hash": hashlib.sha256(b"another").digest()})
    direct = served.send(body)
    assert served.through_asgi == []
    monkeypatch.setattr(DirectReports, "matches", lambda *_: None)
    monkeypatch.setattr(DirectProtocol, "_is_known", lambda *_: False)
    assert served.send(body) == direct
    assert served.through_asgi == [served.path]


UNUSUAL: dict[str, tuple[int, dict[str, Any]]] = {
    "another token": (401, {"Authorization": "Bearer none"}),
    "no scheme": (401, {"Authorization": "none"}),
    "another type": (400, {"Content-Type": "text/plain"}),
    "another Host": (421, {"Host": "attacker.example"}),
    "a web page": (421, {"Origin": "https://attacker.example"}),
    "an unknown parameter": (422, {"query": "?more=1"}),
    "the last request": (200, {"Connection": "close"}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_reaches_the_app(served: Served, name: str) -> None:
    status, changes = UNUSUAL[name]
    assert served.send(served.body(), **changes)[0] == status
    assert served.through_asgi == ([] if status == 421 else [served.path])  # the guard of hosts is in front of what is watched


@pytest.mark.parametrize(("body", "status"), [(b"", 422), (b"{", 400), (b'{"epoch": 1, "rank": 0, "more": 1}', 422)])
def test_refused_bodies_reach_the_app(served: Served, body: bytes, status: int) -> None:
    assert served.send(body)[0] == status
    assert served.through_asgi == [served.path]


def raw(served: Served, body: bytes, headers: str = "") -> bytes:
    """Make the bytes of a request."""
    head = (
        f"POST {served.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return f"{head}Authorization: Bearer {served.rank.order.token}\r\n{headers}\r\n".encode() + body


def test_a_body_may_come_in_pieces(served: Served) -> None:
    request = raw(served, served.body(step(1)))
    sock = served.connection.sock
    for begin in range(0, len(request), 100):
        sock.sendall(request[begin : begin + 100])
    assert sock.recv(65_536).startswith(b"HTTP/1.1 200 ")
    assert served.through_asgi == []
    assert curve(served.world, served.rank.order.job_id) == [1]


def test_a_body_that_does_not_come_has_a_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.connections, "body_timeout_s", 0.1)
    sock = served.connection.sock
    sock.sendall(raw(served, served.body(step(1)))[:-1])
    assert sock.recv(65_536).startswith(b"HTTP/1.1 408 ")
    assert sock.recv(65_536) == b""
    assert served.through_asgi == []


def test_a_large_body_reaches_the_app(served: Served) -> None:
    steps = [step(number) for number in range(1, 501)]
    assert served.send(served.body(*steps))[0] == 200
    assert served.through_asgi == [served.path]


def test_requests_on_one_connection_are_answered_in_order(served: Served) -> None:
    first, last = served.body(step(1)), served.body(step(2))
    health = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    sock = served.connection.sock
    sock.sendall(raw(served, first) + health + raw(served, last))
    received = b""
    while received.count(b"HTTP/1.1 200 OK") < 3 or not received.endswith(b"}"):
        received += sock.recv(65_536)
    marks = [received.find(mark) for mark in (b'"acknowledged_seq":2', b"ok", b'"acknowledged_seq":3')]
    assert marks == sorted(marks)
    assert -1 not in marks


def test_a_server_that_stops_answers_what_it_took(served: Served) -> None:
    body = served.body(step(1))
    with served.world.database.write() as session:  # the report waits for its turn to write
        store.jobs.lock_attempt(session, served.rank.order.attempt_id)
        served.connection.sock.sendall(raw(served, body))
        wait_until(lambda: any(isinstance(each.cycle, _Held) for each in served.server.server_state.connections))
        served.server.should_exit = True
        wait_until(lambda: any(not each.cycle.keep_alive for each in served.server.server_state.connections))
    answer = served.connection.sock.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer
    assert curve(served.world, served.rank.order.job_id) == [1]
