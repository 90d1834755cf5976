"""Usual submissions are answered before ASGI, byte by byte as the route answers them; all others reach the route."""

import http.client
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from service.db.engine import Database
from service.routes.direct_jobs import MAX_BYTES, DirectSubmissions
from service.settings import Settings
from tests.service.conftest import POOLS
from tests.service.serving import serving
from tests.service.world import TurnedClock
from tests.waiting import LONG_S

Answer = tuple[int, list[tuple[str, str]], bytes]


class Served:
    """A server without a dispatcher. `through_asgi` has the path of each request that came to the app."""

    def __init__(self, port: int, database: Database, through_asgi: list[str]) -> None:
        self.database, self.through_asgi = database, through_asgi
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)

    def send(self, body: bytes, path: str = "/v1/jobs", **headers: str) -> Answer:
        """Send a submission; returns the answer's status, headers and body, without what no two jobs share."""
        self.connection.request("POST", path, body, {"Content-Type": "application/json"} | headers)
        answer = self.connection.getresponse()
        of_one = rb'job_\w{26}|\d{4}-\d\d-\d\dT[\d:.]+Z|(?<="position":)\d+|\d+(?= jobs are ahead)'
        alike = re.sub(of_one, b"0", answer.read())
        others = [(name, value) for name, value in answer.getheaders() if name not in ("date", "content-length")]
        return answer.status, [(name, re.sub(r"job_\w{26}", "", value)) for name, value in others], alike

    def reaches_the_app(self, body: bytes, **changes: str) -> bool:
        """Send a submission, and return True if it reached the app."""
        self.through_asgi.clear()
        self.send(body, **changes)
        return self.through_asgi != []


@pytest.fixture
def served(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    yield from served_with(tmp_path, database_url, monkeypatch)


def served_with(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Iterator[Served]:
    settings = Settings(data_dir=tmp_path, port=0, pools=POOLS, **given)
    database = Database(database_url, TurnedClock())
    with serving(settings, database, monkeypatch) as (_, port, through_asgi):
        given_server = Served(port, database, through_asgi)
        with closing(given_server.connection):
            yield given_server


def test_the_answer_is_that_of_the_route(
    served: Served, spec_document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each input is sent to both, the second time with all of it known. What is refused is refused in the same words."""
    changes: list[dict[str, Any]] = [
        {},
        {"labels": {"team": 'ü "quoted"'}, "priority": 7},
        {"resources": {"pool": "none", "workers": 1}},
        {"data": {"source": "text", "path": "/nowhere"}},
        {"name": "a b"},
        {"name": None},
        {"training": spec_document["training"] | {"steps": -1}},
        {"training": spec_document["training"] | {"sequence_length": 1 << 20}},
        {"training": spec_document["training"] | {"global_batch_size": 3, "micro_batch_size": 2}},
        {"precision": {"level": "O9"}},
        {"more": 1},
    ]
    bodies = [json.dumps(spec_document | change).encode() for change in changes]
    bodies += [json.dumps({"name": "only"}).encode(), b"", b"{", b"[]", b"null", b'"\xff"', bodies[0] + b" x"]
    direct = [(served.send(body), served.send(body)) for body in bodies]
    num_direct = 2 * len(bodies) - len(served.through_asgi)
    assert num_direct == 2 * 4, "the two jobs and the two that admission refuses"
    monkeypatch.setattr(DirectSubmissions, "takes", lambda *_: False)
    served.through_asgi.clear()
    assert [(served.send(body),) * 2 for body in bodies] == direct
    assert len(served.through_asgi) == len(bodies)
    assert {first[0] for first, _ in direct} == {201, 400, 422}


def test_keys_are_those_of_the_route(served: Served, spec_document: dict[str, Any]) -> None:
    body, other = (json.dumps(spec_document | {"priority": priority}).encode() for priority in (1, 2))
    headers = {"Idempotency-Key": "one"}
    assert [served.send(each, **headers)[0] for each in (body, body, other)] == [201, 201, 422]
    assert ("Idempotent-Replayed", "true") in [(name.title(), value) for name, value in served.send(body, **headers)[1]]
    assert served.through_asgi == []
    Path(spec_document["data"]["path"]).rename(Path(spec_document["data"]["path"]).with_suffix(".away"))
    try:
        assert served.send(body, **headers)[0] == 201, "what was accepted is the same job again"
    finally:
        Path(spec_document["data"]["path"]).with_suffix(".away").rename(spec_document["data"]["path"])
    assert served.through_asgi == []


UNUSUAL: dict[str, tuple[int, dict[str, str]]] = {
    "another type": (400, {"Content-Type": "text/plain"}),
    "another Host": (421, {"Host": "attacker.example"}),
    "a web page": (421, {"Origin": "https://attacker.example"}),
    "an unknown parameter": (422, {"path": "/v1/jobs?more=1"}),
    "another path": (307, {"path": "/v1/jobs/"}),
    "a key of other characters": (422, {"Idempotency-Key": "o n e"}),
    "a long key": (422, {"Idempotency-Key": "k" * 256}),
    "the last request": (201, {"Connection": "close"}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_reaches_the_app(served: Served, spec_document: dict[str, Any], name: str) -> None:
    status, changes = UNUSUAL[name]
    assert served.send(json.dumps(spec_document).encode(), **changes)[0] == status
    assert len(served.through_asgi) == (status != 421)  # the guard of hosts is in front of what is watched


def test_a_large_spec_reaches_the_app(served: Served, spec_document: dict[str, Any]) -> None:
    body = json.dumps(spec_document).encode()
    assert not served.reaches_the_app(body + b" " * (MAX_BYTES - len(body)))
    assert served.reaches_the_app(body + b" " * (MAX_BYTES - len(body) + 1))


def test_a_tenant_needs_its_key(
    tmp_path: Path, database_url: str, spec_document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, body = tmp_path / "keys", json.dumps(spec_document).encode()
    keys.write_text("team: secret-key-of-the-team-0123456789\n")
    keys.chmod(0o600)
    for served in served_with(tmp_path, database_url, monkeypatch, api_keys_file=keys):
        status, _, text = served.send(body, Authorization="Bearer secret-key-of-the-team-0123456789")
        assert (status, json.loads(text)["tenant"], served.through_asgi) == (201, "team", [])
        for headers in ({}, {"Authorization": "Bearer none"}):
            assert served.send(body, **headers)[0] == 401
        assert served.through_asgi == ["/v1/jobs"] * 2


def test_an_answer_means_that_the_job_is_stored(served: Served, spec_document: dict[str, Any]) -> None:
    """A job that the database refuses is answered with an error, and is not there."""
    body = json.dumps(spec_document).encode()
    assert served.send(body)[0] == 201
    with served.database.read() as session:
        connection = session.connection().connection.dbapi_connection
    if not isinstance(connection, sqlite3.Connection):
        pytest.skip("the file of SQLite is taken away")
    (count,) = connection.execute("SELECT count(*) FROM jobs").fetchone()
    connection.execute("CREATE TRIGGER full BEFORE INSERT ON jobs BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    assert served.send(body)[0] == 500
    assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (count,)
    connection.execute("DROP TRIGGER full")
    assert served.send(body)[0] == 201
    assert served.through_asgi == []
