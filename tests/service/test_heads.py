"""A head that a connection has sent before is not parsed again, and says what the parser would say."""

import json
from functools import partial

import pytest

from service.processes.connections import LimitedProtocol
from service.processes.direct import _Held
from service.processes.heads import Head
from tests.service.simulation import curve
from tests.service.test_direct import Served, raw, served
from tests.service.world import step
from tests.waiting import wait_until

__all__ = ["served"]

REQUEST = b"POST /a HTTP/1.1\r\nHost: here\r\ncontent-Length: 3\r\nAuthorization: Bearer x\r\n\r\nabc"
OTHERS = {
    "another token": REQUEST.replace(b"Bearer x", b"Bearer y"),
    "a header more": REQUEST.replace(b"\r\n\r\n", b"\r\nOrigin: there\r\n\r\n"),
    "no digits": REQUEST.replace(b"3", b""),
    "a sign": REQUEST.replace(b"3", b"+3"),
    "a blank": REQUEST.replace(b"3", b"3 "),
    "a list": REQUEST.replace(b"3", b"3, 3"),
    "digits that are not ASCII": REQUEST.replace(b"3", "\u0663".encode()),
    "too many digits": REQUEST.replace(b"3", b"00000003"),
    "a part of the head": REQUEST[:60],
    "another method": REQUEST.replace(b"POST", b"PUT"),
}


def test_the_length_alone_may_differ() -> None:
    head = Head.of(REQUEST)
    assert head is not None
    assert head.measure(REQUEST) == (len(REQUEST) - 3, 3)
    assert head.measure(REQUEST.replace(b"3", b"1234") + b"more") == (len(REQUEST), 1234)
    assert head.measure(REQUEST[:-3]) == (len(REQUEST) - 3, 3)


@pytest.mark.parametrize("name", OTHERS)
def test_another_head_is_not_known(name: str) -> None:
    head = Head.of(REQUEST)
    assert head is not None
    assert head.measure(OTHERS[name]) is None


@pytest.mark.parametrize(
    "request_", [REQUEST + b"d", REQUEST[:-1], REQUEST[:-8], REQUEST.replace(b"content-Length: 3\r\n", b"")]
)
def test_only_a_whole_request_has_a_head(request_: bytes) -> None:
    assert Head.of(request_) is None


@pytest.fixture
def parsed(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the parser is given once the head of `raw` is known. It has the lengths of bodies with one step."""
    ask(served, raw(served, served.body(step(1))))
    given: list[bytes] = []
    receive = LimitedProtocol.data_received

    def watched(self: LimitedProtocol, data: bytes) -> None:
        given.append(data)
        receive(self, data)

    monkeypatch.setattr(LimitedProtocol, "data_received", watched)
    return given


def ask(served: Served, *pieces: bytes) -> bytes:
    """Send a request in pieces, each of which the server has read before the next; returns what is answered first."""
    sock, sent = served.connection.sock, b""
    for piece in pieces[:-1]:
        sock.sendall(piece)
        sent += piece
        wait_until(partial(_has_read, served, sent))
    sock.sendall(pieces[-1])
    return bytes(sock.recv(65_536))


def _has_read(served: Served, sent: bytes) -> bool:
    return sent in unparsed(served)


def unparsed(served: Served) -> list[bytes | None]:
    """What the server has of requests that it has not given to the parser, by connection."""
    return [each.cycle.unparsed for each in served.server.server_state.connections if isinstance(each.cycle, _Held)]


def test_a_known_head_is_not_parsed(served: Served, parsed: list[bytes]) -> None:
    whole, in_pieces = (raw(served, served.body(step(number))) for number in (2, 3))
    assert ask(served, whole).startswith(b"HTTP/1.1 200 ")
    answer = ask(served, in_pieces[:-50], in_pieces[-50:-1], in_pieces[-1:])
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["acknowledged_seq"] == served.rank.seq
    assert (parsed, served.through_asgi) == ([], [])
    assert curve(served.world, served.rank.order.job_id) == [1, 2, 3]


def test_a_head_in_pieces_is_parsed(served: Served, parsed: list[bytes]) -> None:
    request = raw(served, served.body(step(2)))
    served.connection.sock.sendall(request[:60])
    wait_until(lambda: parsed == [request[:60]])
    assert ask(served, request[60:]).startswith(b"HTTP/1.1 200 ")
    assert ask(served, raw(served, served.body(step(3)))).startswith(b"HTTP/1.1 200 ")  # it is known still
    assert parsed == [request[:60], request[60:]]
    assert curve(served.world, served.rank.order.job_id) == [1, 2, 3]


@pytest.mark.parametrize("num_pieces", [1, 2])
def test_what_follows_a_request_is_parsed(served: Served, parsed: list[bytes], num_pieces: int) -> None:
    first = raw(served, served.body(step(2)))
    both = first + raw(served, served.body(step(3)))
    answers = ask(served, both) if num_pieces == 1 else ask(served, first[:-5], both[len(first) - 5 :])
    while answers.count(b"acknowledged_seq") < 2:
        answers += served.connection.sock.recv(65_536)
    assert parsed == [both]
    assert answers.index(b'"acknowledged_seq":3}') < answers.index(b'"acknowledged_seq":4}')
    assert curve(served.world, served.rank.order.job_id) == [1, 2, 3]


@pytest.mark.parametrize("num_pieces", [1, 2])
def test_a_known_head_with_another_body_reaches_the_app(served: Served, parsed: list[bytes], num_pieces: int) -> None:
    request = raw(served, b"{" * 300)
    answer = ask(served, request) if num_pieces == 1 else ask(served, request[:-5], request[-5:])
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert (parsed, served.through_asgi) == ([request], [served.path])


def test_a_large_body_behind_a_known_head_reaches_the_app(served: Served, parsed: list[bytes]) -> None:
    request = raw(served, served.body(step(2)) + b" " * (64 << 10))
    served.connection.sock.sendall(request)
    assert served.connection.sock.recv(65_536).startswith(b"HTTP/1.1 200 ")
    assert (b"".join(parsed), served.through_asgi) == (request, [served.path])


def test_a_token_that_is_not_remembered_reaches_the_app(served: Served, parsed: list[bytes]) -> None:
    served.forget_tokens()
    request = raw(served, served.body(step(2)))
    assert ask(served, request).startswith(b"HTTP/1.1 200 ")
    assert (parsed, served.through_asgi) == ([request], [served.path])


def test_the_body_behind_a_known_head_has_a_deadline(
    served: Served, parsed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.connections, "body_timeout_s", 0.1)
    assert ask(served, raw(served, served.body(step(2)))[:-1]).startswith(b"HTTP/1.1 408 ")
    assert served.connection.sock.recv(65_536) == b""
    assert parsed == []


def test_a_server_that_stops_answers_what_has_come_in_part(served: Served, parsed: list[bytes]) -> None:
    request = raw(served, served.body(step(2)))
    served.connection.sock.sendall(request[:-5])
    wait_until(lambda: request[:-5] in unparsed(served))
    served.server.should_exit = True
    wait_until(lambda: any(not each.cycle.keep_alive for each in served.server.server_state.connections))
    answer = ask(served, request[-5:])
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer
    assert parsed == []


def test_a_connection_that_rests_is_ended(served: Served, parsed: list[bytes]) -> None:
    for each in served.server.server_state.connections:
        each.timeout_keep_alive = 0.1
    assert ask(served, raw(served, served.body(step(2)))).startswith(b"HTTP/1.1 200 ")
    assert served.connection.sock.recv(65_536) == b""
    assert parsed == []
