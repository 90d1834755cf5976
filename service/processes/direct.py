"""HTTP connections that answer usual reports and submissions themselves, without a task and a cycle of ASGI for each."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from service.http.shortcuts import Direct, Usual
from service.processes.connections import Connections, LimitedProtocol


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


class DirectProtocol(LimitedProtocol):
    """A connection that offers requests to `direct`, and hands those that it leaves to ASGI once their bodies are here."""

    direct: Sequence[Direct]

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
        held = self._held
        if held is not None:
            self._num_unread_bytes = 0
            if held.direct.ask(held.usual, lambda response: self._write(held, response)):
                held.more_body = False
                return
            self._let_go(held)
        super().on_message_complete()

    @property
    def _held(self) -> _Held | None:
        """The request whose body is not whole yet."""
        return self.cycle if isinstance(self.cycle, _Held) and self.cycle.more_body else None

    def _is_plain(self) -> bool:
        """Return True if nothing else is under way, and the connection goes on after the answer."""
        return (
            (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
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

    def _let_go(self, held: _Held) -> None:
        """Hand a request to ASGI."""
        self.cycle = None  # type: ignore[assignment]
        super().on_headers_complete()
        self.cycle.keep_alive = self.cycle.keep_alive and held.keep_alive
        if held.usual.body:
            super().on_body(held.usual.body)

    def _write(self, held: _Held, response: Response) -> None:
        held.response_complete = True
        if held.disconnected or self.transport.is_closing():
            return
        headers = [*self.server_state.default_headers, *response.raw_headers]
        if not held.keep_alive:
            headers.append((b"connection", b"close"))
        head = b"".join([b"%b: %b\r\n" % header for header in headers])
        self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[response.status_code], head, bytes(response.body)))
        if not held.keep_alive:
            self.transport.close()
        self.on_response_complete()


def direct_protocol(connections: Connections, direct: Sequence[Direct]) -> type[DirectProtocol]:
    """Make the protocol of a server; uvicorn calls it for each connection."""

    class Protocol(DirectProtocol):
        pass

    Protocol.open_connections, Protocol.direct = connections, direct
    return Protocol
