"""Clients that do not finish their requests neither stop the service nor fill its memory."""

import http.client
import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from octet.api_schemas import JobState, ReportBody
from octet.service.app import create_app
from octet.service.db.engine import Database
from octet.service.http import bodies
from octet.service.jobs.check_processes import CheckProcesses
from octet.service.processes.connections import LimitedProtocol
from octet.service.processes.server import ACCEPTED_AT_ONCE, http_server, raise_descriptor_limit
from octet.service.processes.startup import listening
from octet.service.settings import Settings
from tests.kit.waiting import LONG_S, wait_until
from tests.service.databases import ON_SQLITE
from tests.service.serving import serving
from tests.service.world import Rank, World, step

KEY = "a key that is long enough"
Serve = Callable[..., Any]


@pytest.fixture
def serve(tmp_path: Path, sqlite_template: Path, openapi_document: dict[str, Any]) -> Serve:
    @contextmanager
    def serving(before: Callable[[int], Any] = lambda _port: None, **changes: Any) -> Iterator[int]:
        """Serve on a port of 127.0.0.1 in a thread; the value is the port. `before` gets it before the first is accepted."""
        settings = Settings(data_dir=tmp_path, port=0, **changes)
        database = Database(f"sqlite:///{sqlite_template}")
        app = create_app(settings, database=database)
        app.openapi_schema = openapi_document
        with listening(settings) as (listener,):
            before(listener.getsockname()[1])
            server = http_server(app, settings)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                yield listener.getsockname()[1]
            finally:
                server.should_exit = True
                thread.join()
                database.close()

    return serving


def connect(port: int, request: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=LONG_S, source_address=(source, 0))
    connection.sendall(request)
    return connection


def status(port: int, path: str = "/healthz") -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    while chunk := connection.recv(65_536):
        received += chunk
    return received


@pytest.mark.parametrize("request_", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127", b"GET / HTTP/1.1\r\n"])
def test_a_head_that_does_not_come_has_a_deadline(serve: Serve, request_: bytes) -> None:
    with serve(request_head_timeout_s=0.1) as port, connect(port, request_) as connection:
        assert until_closed(connection).startswith(b"HTTP/1.1 408 ")


@contextmanager
def stopped(process: multiprocessing.process.BaseProcess) -> Iterator[None]:
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _serve_in_this_process(settings: Settings, database_url: str, port: Any) -> None:
    with listening(settings) as (listener,):
        port.send(listener.getsockname()[1])
        http_server(create_app(settings, database=Database(database_url)), settings).run(sockets=[listener])


@pytest.mark.system
def test_a_head_that_comes_while_the_server_is_stopped_is_in_time(tmp_path: Path, sqlite_template: Path) -> None:
    """The deadline is over when SIGCONT wakes the server, and `epoll_wait`, which it cuts short, has found nothing."""
    head_timeout_s = 1.0
    settings = Settings(data_dir=tmp_path, port=0, request_head_timeout_s=head_timeout_s)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(target=_serve_in_this_process, args=(settings, f"sqlite:///{sqlite_template}", sender))
    server.start()
    try:
        port = receiver.recv()
        assert status(port) == 200
        num_in_time = 0
        while num_in_time < 3:
            began_at = time.monotonic()
            with connect(port) as connection:
                time.sleep(head_timeout_s / 4)  # the server most likely waits for the head by now
                with stopped(server):
                    if time.monotonic() - began_at > 0.9 * head_timeout_s:
                        continue  # this machine is too busy for the client to be in time
                    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                    time.sleep(head_timeout_s)
                assert until_closed(connection).startswith(b"HTTP/1.1 200 ")
                num_in_time += 1
    finally:
        server.kill()
        server.join()


def test_the_second_request_of_a_connection_has_a_deadline_too(serve: Serve) -> None:
    whole = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with serve(request_head_timeout_s=0.3) as port, connect(port, whole + b"GET") as connection:
        received = until_closed(connection)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.1 408 " in received


def test_a_body_that_does_not_come_has_a_deadline(serve: Serve) -> None:
    request = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"
    with serve(request_body_timeout_s=0.1) as port, connect(port, request) as connection:
        assert until_closed(connection).startswith(b"HTTP/1.1 408 ")


def test_healthz_answers_while_one_address_holds_more_connections_than_it_may(serve: Serve) -> None:
    with serve(max_connections_per_address=20, request_head_timeout_s=LONG_S) as port, ExitStack() as stack:
        held = [stack.enter_context(connect(port, b"GET /he")) for _ in range(60)]
        assert status(port) == 200
        with suppress(ConnectionResetError):  # only if the server had not yet read what was sent
            assert until_closed(held[0]) == b""  # the oldest made room


def test_connections_that_are_being_answered_keep_their_place(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, let_go = threading.Semaphore(0), threading.Event()

    def hold(*_: Any) -> bool:
        begun.release()
        return let_go.wait(LONG_S)

    monkeypatch.setattr("octet.service.store.queue.lease_is_held", hold)
    ready = b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    with serve(max_connections_per_address=4) as port, ExitStack() as stack:
        answered = [stack.enter_context(connect(port, ready)) for _ in range(4)]
        for _ in answered:
            assert begun.acquire(timeout=LONG_S)
        with connect(port, b"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as one_more:
            assert until_closed(one_more).startswith(b"HTTP/1.1 503 ")
        with connect(port, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", "127.0.0.2") as other:
            assert until_closed(other).startswith(b"HTTP/1.1 200 ")
        let_go.set()
        assert all(until_closed(connection).startswith(b"HTTP/1.1 200 ") for connection in answered)


@ON_SQLITE
def test_ranks_report_while_connections_of_their_address_take_every_other_place(
    world: World, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Event streams, answers that take long, bodies that do not come and connections that ask nothing."""
    begun, let_go = threading.Semaphore(0), threading.Event()

    def hold(*_: Any) -> None:
        begun.release()
        assert let_go.wait(LONG_S)

    monkeypatch.setattr(CheckProcesses, "check", hold)
    job_id, rank = world.start()
    settings = world.settings.model_copy(update={"port": 0, "max_connections_per_address": 16})
    stream = b"GET /v1/stream?rows=limit%3D1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    validate = (
        b"POST /v1/jobs/validate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    reports = b"POST /internal/v1/attempts/att_01kg9ys7g0zn9d2mqxrybeyjtc/reports HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    slow_report = reports + b"Content-Length: 9\r\n\r\n{"
    with serving(settings, Database(database_url, world.clock)) as (_, port), ExitStack() as stack:
        stack.callback(let_go.set)
        for _ in range(12):
            assert stack.enter_context(connect(port, stream)).recv(4096).startswith(b"HTTP/1.1 200 ")
        for length in range(8, 12):
            document = world.spec.model_dump(mode="json")
            document["training"]["sequence_length"] = length
            spec = json.dumps(document).encode()
            stack.enter_context(connect(port, validate % len(spec) + spec))
            assert begun.acquire(timeout=LONG_S)
        assert status(port, "/v1/jobs") == 503
        for attack in 4 * [b"", b"GET /healthz", slow_report]:
            stack.enter_context(connect(port, attack))
        for number in range(1, 8):
            world.turn(world.settings.lease_s / 2)
            world.dispatch()
            assert report(port, rank, step(number)) == 200
            assert status(port) == 200
        assert world.job(job_id).state is JobState.RUNNING
        (attempt,) = world.attempts(job_id)
        assert attempt.lease_expires_at is not None
        assert (attempt.lease_expires_at - world.clock.now()).total_seconds() == world.settings.lease_s


def report(port: int, rank: Rank, *bodies: ReportBody) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)) as connection:
        headers = {"Authorization": f"Bearer {rank.order.token}", "Content-Type": "application/json"}
        path = f"/internal/v1/attempts/{rank.order.attempt_id}/reports"
        connection.request("POST", path, rank.batch(*bodies).model_dump_json(), headers)
        return connection.getresponse().status


def test_event_streams_leave_connections_for_everybody_else_of_their_address(serve: Serve) -> None:
    stream = b"GET /v1/stream?rows=limit%3D1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with serve(max_connections_per_address=8) as port, ExitStack() as stack:
        for _ in range(6):
            assert stack.enter_context(connect(port, stream)).recv(4096).startswith(b"HTTP/1.1 200 ")
        for _ in range(3):
            closing_stream = stream.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            refused = until_closed(stack.enter_context(connect(port, closing_stream)))
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"6 event streams of 127.0.0.1 are open, as many as may be at once; close some" in refused
            assert status(port) == 200
        with connect(port, stream, "127.0.0.2") as other:
            assert other.recv(4096).startswith(b"HTTP/1.1 200 ")
        stack.pop_all().close()
        wait_until(lambda: _opens(port, stream))


def test_event_streams_of_one_tenant_leave_half_to_others(serve: Serve) -> None:
    stream = b"GET /v1/stream?rows=limit%%3D1 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer the key of %s\r\n\r\n"
    keys = ("greedy:the key of the greedy", "modest:the key of the modest")
    with serve(max_connections=16, max_connections_per_address=0, api_keys=keys) as port, ExitStack() as stack:
        for _ in range(6):
            assert stack.enter_context(connect(port, stream % b"the greedy")).recv(4096).startswith(b"HTTP/1.1 200 ")
        closing_stream = (stream % b"the greedy").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        refused = until_closed(stack.enter_context(connect(port, closing_stream)))
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"6 event streams of tenant greedy are open" in refused
        assert stack.enter_context(connect(port, stream % b"the modest")).recv(4096).startswith(b"HTTP/1.1 200 ")


def _opens(port: int, stream: bytes) -> bool:
    with connect(port, stream) as connection:
        return connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_all_addresses_together_have_a_limit(serve: Serve) -> None:
    with serve(max_connections=16, max_connections_per_address=0) as port, ExitStack() as stack:
        for number in range(40):
            stack.enter_context(connect(port, b"GET", f"127.0.0.{2 + number % 8}"))
        assert status(port) == 200


def test_a_burst_of_connections_leaves_descriptors(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limits count a connection some turns of the event loop after it is accepted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        num_spare = 6 * ACCEPTED_AT_ONCE + 30

        def come_all_at_once(port: int) -> None:
            held = [stack.enter_context(connect(port, source=f"127.0.0.{2 + number % 8}")) for number in range(250)]
            few = max(connection.fileno() for connection in held) + num_spare
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))

        monkeypatch.setattr("octet.service.processes.server.raise_descriptor_limit", lambda: 0)  # which allows 16 connections
        with serve(come_all_at_once) as port:
            assert status(port) == 200
        assert "out of system resource" not in caplog.text


def test_a_declared_length_over_the_limit_is_refused_before_the_body_comes(serve: Serve) -> None:
    for path in (b"/v1/jobs", b"/internal/v1/attempts/att_01kg9ys7g0zn9d2mqxrybeyjtc/reports", b"/nothing"):
        request = b"POST " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 9000000\r\n\r\n"
        with serve() as port, connect(port, request) as connection:
            assert b" 413 " in connection.recv(65_536).splitlines()[0]


def test_a_stranger_s_body_is_not_read(serve: Serve) -> None:
    """Neither 1 MiB for a job without a key, nor 8 MiB of reports without an attempt's token."""
    length = b"Content-Length: 1000000\r\nConnection: close\r\n\r\n"
    job = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n" + length
    reports = b"POST /internal/v1/attempts/att_01kg9ys7g0zn9d2mqxrybeyjtc/reports HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with serve(api_keys=(KEY,)) as port:
        for request in (job, reports + length, reports + b"Authorization: Bearer none\r\n" + length):
            with connect(port, request) as connection:
                assert b" 401 " in connection.recv(65_536).splitlines()[0]


def test_bodies_that_stay_incomplete_give_way_to_others(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 1 << 17)
    head = b"POST /v1/jobs/validate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with serve() as port, ExitStack() as stack:
        incomplete = [
            stack.enter_context(connect(port, head + b"Content-Length: 65000\r\n\r\n" + b" " * 50_000)) for _ in range(6)
        ]
        assert b" 503 " in incomplete[0].recv(65_536).splitlines()[0]
        with connect(port, head + b"Content-Length: 37502\r\n\r\n" + b" " * 37_500 + b"{}") as whole:
            assert b" 422 " in whole.recv(65_536).splitlines()[0]
        assert status(port) == 200


@pytest.mark.system
def test_pipelined_requests_are_parsed_one_at_a_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies that hold ends of heads, in one piece and in chunks, are among them. Every answer comes, in order."""
    begun, let_go, parsed = threading.Event(), threading.Event(), []

    def hold(*_: Any) -> bool:
        begun.set()
        return let_go.wait(LONG_S)

    def on_url(protocol: LimitedProtocol, url: bytes, before: Any = LimitedProtocol.on_url) -> None:
        parsed.append(url)
        before(protocol, url)

    monkeypatch.setattr("octet.service.store.queue.lease_is_held", hold)
    monkeypatch.setattr(LimitedProtocol, "on_url", on_url)
    host = b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    post = b"POST /v1/jobs" + host + b"Content-Type: application/json\r\n"
    some = [
        b"GET /healthz" + host + b"\r\n",
        post + b"Content-Length: 12\r\n\r\n" + 3 * b"\r\n\r\n",
        post + b"Transfer-Encoding: chunked\r\n\r\n4\r\n\r\n\r\n\r\n0\r\n\r\n",
        b"GET /nothing" + host + b"\r\n",
    ]
    with serve() as port, connect(port, b"GET /readyz" + host + b"\r\n" + 500 * b"".join(some)) as connection:
        assert begun.wait(LONG_S)
        assert status(port) == 200
        at_once = list(parsed)
        let_go.set()
        connection.sendall(b"GET /healthz" + host + b"Connection: close\r\n\r\n")
        received = until_closed(connection)
    assert at_once == [b"/readyz", b"/healthz"]  # the second is the one that `status` asked on a connection of its own
    statuses = [int(number) for number in re.findall(rb"HTTP/1\.1 (\d+) ", received)]
    assert statuses == [200, *(500 * [200, 400, 400, 404]), 200]


def test_the_openapi_document_is_written_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr("octet.service.app.json.dumps", lambda document: written.append(document) or "{}")
    with serve() as port:
        assert [status(port, "/openapi.json") for _ in range(3)] == 3 * [200]
    assert len(written) == 1


HEAD = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /healthz HTTP/1.1\r\n\r\n",
        HEAD + b"Host: 127.0.0.1\r\n\r\n",
        pytest.param(b"GET /" + b"a" * 500_000, marks=pytest.mark.matrix),
        HEAD + b"A: " + b"a" * 500_000,
        pytest.param(HEAD + b"".join(b"A: %05d\r\n" % number for number in range(12_000)), marks=pytest.mark.matrix),
        pytest.param(CHUNKED + b"1;" + b"a" * 500_000, marks=pytest.mark.matrix),
        CHUNKED + b"0\r\nA: " + b"a" * 500_000,
    ],
    ids=["no host", "two hosts", "path", "header", "headers", "chunk", "trailer"],
)
def test_a_head_that_is_too_large_or_names_no_host_is_refused(serve: Serve, request_: bytes) -> None:
    with serve() as port, connect(port, request_) as connection, suppress(ConnectionResetError):
        assert until_closed(connection).startswith(b"HTTP/1.1 400 ")


def test_the_process_may_open_as_many_files_as_the_system_allows() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        allowed = raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (allowed, before[1])
        assert allowed >= min(1 << 20, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
