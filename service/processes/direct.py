"""HTTP connections that answer the usual reports of ranks themselves, without a task and a cycle of ASGI for each."""

import asyncio
from dataclasses import dataclass, field

from fastapi import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from service.http.shortcuts import Usual
from service.processes.connections import Connections, LimitedProtocol
from service.routes.direct import DirectReports


@dataclass(eq=False)
class _Report:
    """A request that may be answered here. It has what uvicorn's protocol looks at in the cycle of a request."""

    usual: Usual
    message_event: asyncio.Event = field(default_factory=asyncio.Event)
    keep_alive: bool = True
    more_body: bool = True
    response_started: bool = False
    response_complete: bool = False
    disconnected: bool = False


class DirectProtocol(LimitedProtocol):
    """A connection that offers requests to `direct`, and hands those that it leaves to ASGI once their bodies are here."""

    direct: DirectReports

    def on_headers_complete(self) -> None:
        report = self._report() if self._is_plain() else None
        if report is None:
            super().on_headers_complete()
        else:
            self.cycle = report  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        report = self._held
        if report is None:
            super().on_body(body)
        else:
            self._num_unread_bytes = 0
            report.usual.body += body

    def on_message_complete(self) -> None:
        report = self._held
        if report is not None:
            self._num_unread_bytes = 0
            if self.direct.ask(report.usual, lambda response: self._write(report, response)):
                report.more_body = False
                return
            self._let_go(report)
        super().on_message_complete()

    @property
    def _held(self) -> _Report | None:
        """The report whose body is not whole yet."""
        return self.cycle if isinstance(self.cycle, _Report) and self.cycle.more_body else None

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

    def _report(self) -> _Report | None:
        attempt_id = self.direct.attempt_of(self.parser.get_method(), self.url)
        if attempt_id is None:
            return None
        scope = {**self.scope, "method": "POST", "path": self.url.decode(), "query_string": b""}
        usual = Usual(scope, b"", {"attempt_id": attempt_id})
        return _Report(usual) if self.direct.takes(usual) else None

    def _let_go(self, report: _Report) -> None:
        """Hand a request to ASGI."""
        self.cycle = None  # type: ignore[assignment]
        super().on_headers_complete()
        self.cycle.keep_alive = self.cycle.keep_alive and report.keep_alive
        if report.usual.body:
            super().on_body(report.usual.body)

    def _write(self, report: _Report, response: Response) -> None:
        report.response_complete = True
        if report.disconnected or self.transport.is_closing():
            return
        headers = [*self.server_state.default_headers, *response.raw_headers]
        if not report.keep_alive:
            headers.append((b"connection", b"close"))
        head = b"".join([b"%b: %b\r\n" % header for header in headers])
        self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[response.status_code], head, bytes(response.body)))
        if not report.keep_alive:
            self.transport.close()
        self.on_response_complete()


def direct_protocol(connections: Connections, direct: DirectReports) -> type[DirectProtocol]:
    """Make the protocol of a server; uvicorn calls it for each connection."""

    class Protocol(DirectProtocol):
        pass

    Protocol.open_connections, Protocol.direct = connections, direct
    return Protocol
