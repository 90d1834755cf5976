"""The connection that carries a rank's reports: kept open, opened again, never left with half an answer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from octet.worker.reporting.reporter import FAILURES, Answer, Connection
from tests.kit.servers import running
from tests.kit.waiting import LONG_S


class Server(HTTPServer):
    """Keeps what it was sent, with the number of the connection, and answers what `answers` says, 200 by default."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.heard: list[tuple[int, str, str, bytes]] = []
        self.answers: list[str] = []
        self.num_connections = 0
        self.closed = threading.Event()

    def shutdown_request(self, request: object) -> None:
        super().shutdown_request(request)  # type: ignore[arg-type]
        self.closed.set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append((self.server.num_connections, self.path, self.headers["Authorization"], body))
        answer = self.server.answers.pop(0) if self.server.answers else "200"
        if answer == "half":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
            self.close_connection = True
            return
        self.send_response(int(answer.split()[0]))
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())
        self.close_connection = answer.endswith("closes")

    def log_message(self, *_arguments: object) -> None:
        pass


@contextmanager
def connected(server: Server) -> Iterator[Connection]:
    connection = Connection(f"http://127.0.0.1:{server.server_port}/reports", "secret", 30)
    try:
        yield connection
    finally:
        connection.close()


def test_requests_share_a_connection_and_carry_the_token() -> None:
    with running(Server()) as server, connected(server) as connection:
        assert [connection.post(b"{}") for _ in range(3)] == [Answer(200, b"200")] * 3
    assert server.heard == [(1, "/reports", "Bearer secret", b"{}")] * 3


def test_a_connection_that_the_server_has_closed_is_opened_again() -> None:
    with running(Server()) as server, connected(server) as connection:
        server.answers = ["200 closes"]
        connection.post(b"1")
        assert server.closed.wait(LONG_S)
        server.answers = ["503"]
        assert connection.post(b"2").status == 503
        assert connection.post(b"3").status == 200
    assert [number for number, *_ in server.heard] == [1, 2, 2]


def test_after_half_an_answer_the_next_request_has_its_own() -> None:
    with running(Server()) as server, connected(server) as connection:
        server.answers = ["half"]
        with pytest.raises(FAILURES):
            connection.post(b"1")
        assert connection.post(b"2") == Answer(200, b"200")


def test_nobody_there_is_a_failure() -> None:
    with running(Server()) as server:
        pass
    with connected(server) as connection, pytest.raises(FAILURES):
        connection.post(b"1")


def test_an_address_without_http_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot report to 'ftp://host'; allowed: http://"):
        Connection("ftp://host", "secret", 1)
