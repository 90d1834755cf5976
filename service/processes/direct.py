"""HTTP connections that answer usual reports and submissions themselves, without a task and a cycle of ASGI for each.

A request with the same head as the one before it on its connection is not even given to the parser; see `heads.py`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from service.http.shortcuts import Direct, Usual
from service.processes.connections import Connections, LimitedProtocol
from service.processes.heads import Head


@dataclass(eq=False)
class _Held:
    """A request that may be answered here. It has what uvicorn's protocol looks at in the cycle of a request."""

    direct: Direct
    usual: Usual
    message_event: asyncio.Event = field(default_factory=asyncio.Event)
    keep_alive: bool = True
    more_body: bool = True
    response_started: bool = False
    response_complete: bool = False
    disconnected: bool = False
    unparsed: bytes | None = None
    """What was received of a request whose head is known. The parser has not seen it."""


class DirectProtocol(LimitedProtocol):
    """A connection that offers requests to `direct`, and hands those that it leaves to ASGI once their bodies are here."""

    direct: Sequence[Direct]
    _head: tuple[Head, Direct, Usual] | None = None
    """Of the last request that was parsed and taken, with what the parser made of it."""
    _is_between = True
    """True while the parser is between two requests."""
    _read_at_once = b""
    """What is being parsed, if it began a request."""

    def data_received(self, data: bytes) -> None:
        held, goes_on = self._held, True
        if held is not None and held.unparsed is not None:
            data, goes_on = held.unparsed + data, held.keep_alive
            self.cycle = None  # type: ignore[assignment]
        if not self._is_known(data):
            self._read_at_once = data if self._is_between and not self._arrived else b""
            super().data_received(data)
            self._read_at_once = b""
        if not goes_on and self.cycle is not None:  # the server stops, and said so while a part was here
            self.cycle.keep_alive = False

    def on_message_begin(self) -> None:
        self._is_between = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        held = self._taken() if self._is_plain() else None
        if held is None:
            super().on_headers_complete()
        else:
            self.cycle = held  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        held = self._held
        if held is None:
            super().on_body(body)
        else:
            self._num_unread_bytes = 0
            held.usual.body += body

    def on_message_complete(self) -> None:
        self._is_between = True
        held = self._held
        if held is not None:
            self._num_unread_bytes = 0
            if self._ask(held):
                head = Head.of(self._read_at_once)
                self._head = (head, held.direct, held.usual.again(b"", 0)) if head is not None else self._head
                return
            self._let_go(held)
        super().on_message_complete()

    @property
    def _held(self) -> _Held | None:
        """The request whose body is not whole yet."""
        return self.cycle if isinstance(self.cycle, _Held) and self.cycle.more_body else None

    @property
    def _is_idle(self) -> bool:
        """True if no request is under way, and an answer could be written."""
        return (self.cycle is None or self.cycle.response_complete) and not self.flow.write_paused

    def _is_plain(self) -> bool:
        """Return True if nothing else is under way, and the connection goes on after the answer."""
        return (
            self._is_idle
            and not self.expect_100_continue
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and not self.parser.should_upgrade()
            and sum(name == b"host" for name, _ in self.headers) == 1
        )

    def _taken(self) -> _Held | None:
        method = self.parser.get_method()
        for direct in self.direct:
            path_params = direct.matches(method, self.url)
            if path_params is not None:
                scope = {**self.scope, "method": "POST", "path": self.url.decode(), "query_string": b""}
                usual = Usual(scope, b"", path_params)
                return _Held(direct, usual) if direct.takes(usual) else None
        return None

    def _is_known(self, data: bytes) -> bool:
        """Take a request with the known head, or what has come of it, from its first byte on. Returns False, and does nothing,
        if the parser has to see these bytes.
        """
        if self._head is None or self._arrived or not self._is_between or not self._is_idle:
            return False
        head, direct, usual = self._head
        measured = head.measure(data)
        if measured is None:
            return False
        begin, num_bytes = measured
        held = _Held(direct, usual.again(data[begin:], num_bytes))
        if len(data) > begin + num_bytes or not direct.takes(held.usual):
            return False
        if len(data) < begin + num_bytes:
            held.unparsed = data
        elif not self._ask(held):
            return False
        self._unset_keepalive_if_required()
        self.cycle = held  # type: ignore[assignment]
        self._follow()
        return True

    def _ask(self, held: _Held) -> bool:
        """Begin to answer a request if its body, which is whole, is usual."""
        if not held.direct.ask(held.usual, lambda answer: self._write(held, answer)):
            return False
        held.more_body = False
        return True

    def _let_go(self, held: _Held) -> None:
        """Hand a request to ASGI."""
        self.cycle = None  # type: ignore[assignment]
        super().on_headers_complete()
        self.cycle.keep_alive = self.cycle.keep_alive and held.keep_alive
        if held.usual.body:
            super().on_body(held.usual.body)

    def _write(self, held: _Held, answer: Response | bytes) -> None:
        held.response_complete = True
        if held.disconnected or self.transport.is_closing():
            return
        if isinstance(answer, bytes):
            status, headers, body = 200, [(b"content-length", b"%d" % len(answer)), _JSON], answer
        else:
            status, headers, body = answer.status_code, answer.raw_headers, bytes(answer.body)
        headers = [*self.server_state.default_headers, *headers]
        if not held.keep_alive:
            headers.append((b"connection", b"close"))
        head = b"".join([b"%b: %b\r\n" % header for header in headers])
        self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[status], head, body))
        if not held.keep_alive:
            self.transport.close()
        if self.pipeline or self._arrived:
            self.on_response_complete()
        else:
            self.server_state.total_requests += 1
            self._rest(self.timeout_keep_alive)


_JSON = (b"content-type", b"application/json")


def direct_protocol(connections: Connections, direct: Sequence[Direct]) -> type[DirectProtocol]:
    """Make the protocol of a server; uvicorn calls it for each connection."""

    class Protocol(DirectProtocol):
        pass

    Protocol.open_connections, Protocol.direct = connections, direct
    return Protocol
