"""The log in JSON says what a line is about, and one trace id follows a job from its request to its ranks."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas.trace_context import TraceContext
from octet.service.app import create_app
from octet.service.jobs.check_processes import CheckProcesses
from octet.service.logs import JsonLines, bound_fields, log_fields
from octet.service.settings import Settings
from tests.service.conftest import POOLS
from tests.service.databases import ON_SQLITE
from tests.service.world import World

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
KEY = {"Authorization": "Bearer the key of tenant one"}
Document = dict[str, Any]


class Lines(logging.Handler):
    """Keeps each line that a collector of logs would read."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.read: list[Document] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        assert "\n" not in text
        self.read.append(json.loads(text))

    def about(self, words: str) -> Document:
        (line,) = [line for line in self.read if words in line["message"]]
        return line


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(before)


@pytest.fixture
def client(world: World, tmp_path: Path, check_processes: CheckProcesses) -> Iterator[TestClient]:
    settings = Settings(data_dir=tmp_path, pools=POOLS, api_keys=("the operator's own key", "one:the key of tenant one"))
    app = create_app(settings, database=world.database, checks=check_processes)
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield client


@ON_SQLITE
def test_one_trace_follows_a_job_from_its_request_to_its_ranks(
    client: TestClient, world: World, spec_document: Document, lines: Lines
) -> None:
    answer = client.post("/v1/jobs", json=spec_document, headers=KEY | CALLER | {"X-Request-ID": "from-a-proxy"})
    job = answer.json()
    assert job["trace_id"] == TRACE
    assert "traceparent" not in answer.headers  # it is a header of requests
    assert client.get(f"/v1/jobs/{job['id']}", headers=KEY).json()["trace_id"] == TRACE
    submitted = lines.about("submitted, for pool")
    of_request = {"request_id": "from-a-proxy", "principal": "the key of one", "trace_id": TRACE}
    assert submitted.items() >= (of_request | {"job_id": job["id"], "level": "INFO"}).items()
    world.dispatch()
    rank = world.rank_of(job["id"])
    handed_on = TraceContext.parse(str(rank.order.traceparent))
    assert handed_on is not None
    assert (handed_on.trace_id, handed_on.span_id) == (TRACE, submitted["span_id"])
    assert handed_on.span_id != SPAN  # the request is a child of its caller's span
    rank.begin()
    rank.succeed()
    for words in ("attempt 1 is on the cluster", "started: attempt 1", "ended: it"):
        of_attempt = {"trace_id": TRACE, "job_id": job["id"], "attempt_id": rank.order.attempt_id}
        assert lines.about(words).items() >= of_attempt.items(), words


@ON_SQLITE
def test_with_a_wrong_traceparent_or_two_a_new_trace_begins(client: TestClient, spec_document: Document) -> None:
    wrong = ["", f"00-{TRACE}-{SPAN}-01-more", f"00-{'0' * 32}-{SPAN}-01", "\xff"]
    sent: list[Any] = [[(b"traceparent", header.encode("latin-1"))] for header in wrong]
    found = set()
    for headers in [*sent, [*CALLER.items(), *CALLER.items()]]:
        job = client.post("/v1/jobs", json=spec_document, headers=[*KEY.items(), *headers]).json()
        assert int(job["trace_id"], 16)
        found.add(job["trace_id"])
    assert len(found - {TRACE}) == len(wrong) + 1


@ON_SQLITE
def test_a_clone_has_the_trace_of_its_own_request(client: TestClient, spec_document: Document) -> None:
    job = client.post("/v1/jobs", json=spec_document, headers=KEY).json()
    clone = client.post(f"/v1/jobs/{job['id']}/clone", headers=KEY | CALLER).json()
    assert clone["trace_id"] == TRACE != job["trace_id"]


@ON_SQLITE
def test_the_jobs_of_a_comparison_have_its_trace(client: TestClient, world: World, spec_document: Document) -> None:
    asked = {"job": spec_document | {"name": "compared"}, "vary": {"precision.level": ["bf16-amp", "O2"]}, "seeds": 2}
    answer = client.post("/v1/comparisons", json=asked, headers=KEY | CALLER)
    assert answer.status_code == 201, answer.text
    world.dispatch()
    jobs = client.get("/v1/jobs", headers=KEY).json()["data"]
    assert jobs
    assert {job["trace_id"] for job in jobs} == {TRACE}


@ON_SQLITE
def test_a_refused_key_is_counted_and_logged_with_its_request(client: TestClient, lines: Lines) -> None:
    answer = client.get("/v1/jobs", headers={"Authorization": "Bearer a wrong key, long enough"} | CALLER)
    refused = lines.about("for its key")
    assert (refused["request_id"], refused["trace_id"]) == (answer.headers["x-request-id"], TRACE)
    assert "principal" not in refused
    metrics = client.get("/metrics", headers={"Authorization": "Bearer the operator's own key"}).text
    assert "octet_refused_keys_total 1.0" in metrics


@ON_SQLITE
def test_what_fails_is_logged_with_its_request_and_trace(client: TestClient, lines: Lines) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    client.app.add_route("/v1/fails", lambda _: fail())  # type: ignore[attr-defined]  (of TestClient's ASGI app)
    answer = client.get("/v1/fails", headers=KEY | CALLER)
    assert answer.status_code == 500
    failed = lines.about("/v1/fails failed")
    assert (failed["trace_id"], failed["level"]) == (TRACE, "ERROR")
    assert failed["exception"].endswith("RuntimeError: on purpose")


def test_fields_are_those_of_the_block() -> None:
    with log_fields({"job_id": "one"}):
        with log_fields({"attempt_id": "two"}):
            assert bound_fields() == {"job_id": "one", "attempt_id": "two"}
        assert bound_fields() == {"job_id": "one"}
    assert bound_fields() == {}


def test_a_process_logs_one_object_a_line() -> None:
    code = (
        "import logging, warnings\n"
        "from octet.service.processes.startup import log_to_stderr\n"
        "log_to_stderr('json')\n"
        "logging.getLogger('octet.x').info('two\\nlines of %s', 'text', extra={'job_id': 'job_1'})\n"
        "warnings.warn('a warning')\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.getLogger('octet.y').exception('failed')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, warning, failed = [json.loads(line) for line in ended.stderr.splitlines()]
    assert first.pop("time").endswith("Z")
    assert first == {"level": "INFO", "logger": "octet.x", "message": "two\nlines of text", "job_id": "job_1"}
    assert (warning["level"], "a warning" in warning["message"]) == ("WARNING", True)
    assert "ZeroDivisionError" in failed["exception"]
