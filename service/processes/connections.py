"""Limits of the HTTP server's connections: how many there are, and how long a client may take to ask and to listen.

uvicorn waits for a request without end and accepts any number of connections, so a client that never finishes its requests
could take all descriptors. Here a connection over a limit takes the place of the one that has been waiting for its
request for longest; connections whose request is being answered keep their place. Of requests that a client pipelines, one
is parsed and answered at a time, so that its connection gets no more turns of the event loop, and no more memory, than others.

Requests are parsed by httptools (the parser of Node.js), which is C where h11 is Python. It has no limits of its own.
"""

import asyncio
import logging
import math
import os
import socket
import struct
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_local_addr, get_remote_addr

from octet.service.http.guards import USER
from octet.service.settings import Settings
from octet.service.tls import Certificate

DESCRIPTORS_KEPT = 256
"""Descriptors for the database, the log and Ray, which connections must not take."""

RESERVED_PART = 8
"""One of so many places is reserved; an address has so many more than the limit of its connections."""
RESERVED_PATHS = (b"/internal/v1/", b"/healthz", b"/readyz", b"/metrics")
"""Requests to these paths are answered on reserved places: reports, health, metrics and what is to be scraped."""

_END_OF_HEAD = b"\r\n\r\n"

MAX_HEAD_BYTES = 64 << 10
"""The most of a request line with its headers and trailers, and of a line that does not end (one read of the socket more)."""

_TLS_END_S = 1.0
"""The time that a client has to answer the end of TLS. One that does not read would hold up the end of the server."""
_TOO_MANY = ("503 Service Unavailable", "too many connections")
_NOT_INTERNAL = ("404 Not Found", "this address has reports, health and metrics; the API has another one")

Phase = Literal["head", "body", "answer"]

logger = logging.getLogger(__name__)


@dataclass
class _Places:
    """Places for connections. limit_per_address: 0 means no limit."""

    limit: int
    limit_per_address: int
    _by_address: dict[str, dict["LimitedProtocol", None]] = field(default_factory=dict)
    _num_open: int = 0

    def add(self, connection: "LimitedProtocol") -> bool:
        """Add a connection, and end another in its place if there are too many. False if there is no place."""
        of_address = self._by_address.get(connection.address, {})
        if self.limit_per_address and len(of_address) >= self.limit_per_address and not self._end_one_of([of_address]):
            return False
        if self._num_open >= self.limit and not self._end_one_of(list(self._by_address.values())):
            return False
        self._by_address.setdefault(connection.address, {})[connection] = None
        self._num_open += 1
        return True

    def remove(self, connection: "LimitedProtocol") -> None:
        of_address = self._by_address.get(connection.address, {})
        if connection in of_address:
            del of_address[connection]
            self._num_open -= 1
            if not of_address:
                del self._by_address[connection.address]

    def _end_one_of(self, groups: "list[dict[LimitedProtocol, None]]") -> bool:
        waiting = [connection for group in groups for connection in group if connection.phase != "answer"]
        if not waiting:
            return False
        longest = min(waiting, key=lambda connection: connection.phase_began_at)
        self.remove(longest)
        longest.transport.abort()
        return True


@dataclass
class Connections:
    """The open connections of one listener.

    An eighth of all places is reserved: where every other is taken by connections that are being answered, as event streams
    and downloads are for hours, ranks can still report, and health and metrics can be read.
    finds_users: tell the app, as an extension of ASGI, which user of this machine asks.
    """

    ordinary: _Places
    reserved: _Places
    head_timeout_s: float
    body_timeout_s: float
    answer_stall_timeout_s: float
    finds_users: bool = False

    is_internal: bool = False
    """True if requests to RESERVED_PATHS are the only ones that are answered."""

    @classmethod
    def of(cls, settings: Settings, most: int, *, is_internal: bool) -> "Connections":
        """Build the limits of a listener with so many connections."""
        of_address = settings.max_connections_per_address
        num_reserved = most // RESERVED_PART
        return cls(
            ordinary=_Places(most - num_reserved, of_address),
            reserved=_Places(num_reserved, math.ceil(of_address / RESERVED_PART)),
            head_timeout_s=settings.request_head_timeout_s,
            body_timeout_s=settings.request_body_timeout_s,
            answer_stall_timeout_s=settings.answer_stall_timeout_s,
            finds_users=settings.is_for_this_machine and shows_users(),
            is_internal=is_internal,
        )


@dataclass
class Listeners:
    """The connections of a server's listeners: those of the API, and those of the internal address if there is one.

    Each has as many as the settings allow one to have, so no connection of the API takes a place of ranks.
    """

    api: Connections
    internal: Connections
    internal_port: int | None = None
    """Known once the server starts."""

    @classmethod
    def of(cls, settings: Settings, num_descriptors: int, *, is_internal: bool = False) -> "Listeners":
        """Build the limits. num_descriptors: how many files and sockets this process may have open.

        is_internal: the first listener is that of the internal address, and there is no other.
        """
        if settings.is_for_this_machine and not shows_users():
            logger.warning(
                "this system does not show whose connections come: without API keys every user of this machine is served"
            )
        num_listeners = 2 if settings.internal_address and not is_internal else 1
        most = max(16, min(settings.max_connections, (num_descriptors - DESCRIPTORS_KEPT) // num_listeners))
        api, internal = (Connections.of(settings, most, is_internal=each) for each in (is_internal, True))
        return cls(api, internal)

    def of_port(self, port: int | None) -> Connections:
        """Return the connections of the listener with a port."""
        return self.internal if self.internal_port is not None and port == self.internal_port else self.api


class LimitedProtocol(HttpToolsProtocol):
    """An HTTP connection with deadlines for the head of a request, for its body, and for a client that does not read.

    What arrives while a request is being answered is parsed after the answer, and nothing more is read until then. A request
    that is not HTTP/1, has a head of more than MAX_HEAD_BYTES, or does not name one Host is answered with 400.
    """

    listeners: Listeners
    open_connections: Connections
    phase: Phase = "head"
    phase_began_at: float
    address: str
    places: _Places
    _refusal: tuple[str, str] | None = None
    """Status and reason, if the connection has asked for what its place is not for."""
    _num_head_bytes = 0
    _num_unread_bytes = 0
    _arrived = b""
    _num_parsed = 0  # of what has arrived
    _ends_at = math.inf
    """When the phase has to be over, by the clock of the event loop."""
    _deadline: asyncio.TimerHandle | None = None
    """Comes no later than that. It is not moved with each request: it looks when it comes, and waits again."""
    _is_last_look = False
    _user: int | None = None
    """The user of this machine who made the connection, if that is asked. None if the client's socket is gone."""
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        has_place = self.transport is not None  # over TLS, which gives it another transport now
        super().connection_made(transport)
        if not has_place and not self.take_place(transport):
            self._refuse(*_TOO_MANY)
            return
        if self.open_connections.finds_users and self.client and self.server:
            with suppress(OSError):
                self._user = user_of(self.client, self.server)

    def take_place(self, transport: asyncio.Transport) -> bool:
        """Count a connection that was just accepted, and set the deadline of its first head. False if there is no place."""
        self.transport = transport
        client, server = get_remote_addr(transport), get_local_addr(transport)
        self.address = client[0] if client else ""
        self.open_connections = self.listeners.of_port(server[1] if server else None)
        self.places = self.open_connections.ordinary
        if not self.places.add(self):
            self.places = self.open_connections.reserved
            if not self.places.add(self):
                return False
        self._begin("head", self.open_connections.head_timeout_s)
        return True

    def leave_place(self) -> None:
        """Give the place back, if the connection has one."""
        self.places.remove(self)
        self._cancel_deadlines()

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave_place()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._arrived = self._arrived[self._num_parsed :] + data if self._arrived else data
        self._num_parsed = 0
        self._parse()

    def _parse(self) -> None:
        """Parse what has arrived, up to a request that has to be answered before the next."""
        while self._num_parsed < len(self._arrived) and self.phase != "answer" and not self.transport.is_closing():
            # The parser does not stop between requests. A piece that ends with a head has one more at most.
            begin, end = self._num_parsed, self._arrived.find(_END_OF_HEAD, self._num_parsed) + len(_END_OF_HEAD)
            self._num_parsed = end if end >= len(_END_OF_HEAD) else len(self._arrived)
            self._feed(self._arrived[begin : self._num_parsed])
        if self._num_parsed < len(self._arrived):
            self.flow.pause_reading()
        else:
            self._arrived, self._num_parsed = b"", 0

    def _feed(self, data: bytes) -> None:
        self._num_unread_bytes += len(data)
        super().data_received(data)
        if self._num_unread_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Invalid HTTP request received.")  # a header or a chunk that does not end
        self._follow()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.open_connections.finds_users:
            self.scope["extensions"] = {USER: {"id": self._user}}
        self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_unread_bytes = 0
        if self.parser.get_http_version() == "1.1" and sum(name == b"host" for name, _ in self.headers) != 1:
            raise ValueError("a request has one Host header")
        if not self.url.startswith(RESERVED_PATHS):
            if self.open_connections.is_internal:
                self._refusal = _NOT_INTERNAL
            elif self.places is self.open_connections.reserved:
                self._refusal = _TOO_MANY
            if self._refusal is not None:
                raise ValueError("the place is not for this request")
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser or one of its callbacks has refused."""
        if self._refusal is not None:
            self._refuse(*self._refusal)
        else:
            super().send_400_response(msg)

    def on_body(self, body: bytes) -> None:
        self._num_unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unread_bytes = 0
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        """Count a part of the head. An error in a callback makes the parser refuse the request."""
        self._num_unread_bytes = 0
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError(f"the head of a request is larger than {MAX_HEAD_BYTES} bytes")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()
        if self._arrived:
            self._parse()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.open_connections.answer_stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _follow(self) -> None:
        """Set the deadline of a phase when it begins. More data of the same phase does not move the deadline."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            if self.phase != "head":
                self._begin("head", self.open_connections.head_timeout_s)
        elif not self.cycle.more_body:
            self._begin("answer", None)
        elif self.phase != "body":
            self._begin("body", self.open_connections.body_timeout_s)

    def _begin(self, phase: Phase, timeout_s: float | None) -> None:
        self.phase, self.phase_began_at = phase, self.loop.time()
        self._ends_at = math.inf if timeout_s is None else self.phase_began_at + timeout_s
        self._watch()

    def _watch(self) -> None:
        """Have a timer that comes no later than the next deadline."""
        self._is_last_look = False
        if self._ends_at == math.inf or (self._deadline is not None and self._deadline.when() <= self._ends_at):
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_at(self._ends_at, self._look)

    def _look(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        now = self.loop.time()
        if now >= self._ends_at and not self._is_last_look:
            # After SIGCONT, and after any wait that a signal cuts short, `select` returns without looking once its time is up
            # (PEP 475). What has come meanwhile is read in the next turn of the loop, before its timers.
            self._is_last_look, self._deadline = True, self.loop.call_at(now, self._look)
        elif now >= self._ends_at:
            self._refuse("408 Request Timeout", f"the {self.phase} of the request did not arrive in time")
        else:
            self._watch()

    def _refuse(self, status: str, reason: str) -> None:
        """Answer in plain bytes, if no answer has begun, and end the connection. Nothing of it reaches the app."""
        if self.scheme is None:  # in the handshake of TLS
            self.transport.abort()
            return
        is_between_answers = self.cycle is None or not self.cycle.response_started or self.cycle.response_complete
        if is_between_answers and not self.pipeline:
            head = (f"HTTP/1.1 {status}", "Connection: close", "Content-Type: text/plain", f"Content-Length: {len(reason)}")
            self.transport.write("\r\n".join([*head, "", reason]).encode())
        self._cancel_deadlines()
        self.transport.close()

    def _cancel_deadlines(self) -> None:
        for timer in (self._deadline, self._stalled):
            if timer is not None:
                timer.cancel()


class TlsProtocol(SSLProtocol):
    """A connection over TLS. It has its place, and the deadline of its first head, from before the handshake on."""

    max_size = 32 << 10
    """Bytes of the buffer that each connection has. asyncio's 256 KiB are 1 GiB for all connections that may be open."""

    def __init__(self, protocol: LimitedProtocol, certificate: Certificate) -> None:
        super().__init__(
            protocol.loop,
            protocol,
            certificate.context(),
            waiter=None,  # type: ignore[arg-type]  # nobody waits for the handshake; typeshed leaves this out
            server_side=True,
            ssl_shutdown_timeout=_TLS_END_S,
        )
        self._protocol_over_tls = protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._protocol_over_tls.take_place(transport):
            super().connection_made(transport)
        else:
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)  # which says nothing to the other protocol if this is during the handshake
        self._protocol_over_tls.leave_place()


def protocol_with(listeners: Listeners, certificate: Certificate | None = None) -> Callable[..., asyncio.BaseProtocol]:
    """Make what uvicorn calls for the protocol of each connection of one server."""
    plain: Any = type("Protocol", (LimitedProtocol,), {"listeners": listeners})
    if certificate is None:
        return plain  # type: ignore[no-any-return]
    return lambda **arguments: TlsProtocol(plain(**arguments), certificate)


# Find the user at the other end of a connection within this machine, by Linux's socket diagnostics (sock_diag(7)).
#
# A server without keys serves the user who runs it and no other: whoever may submit a job runs code as that user. Nobody needs
# a key for that, because the kernel knows whose socket is at the other end.

_SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _NETLINK_SOCK_DIAG = 20, 1, 4
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI")  # inet_diag_req_v2, up to its id: family, protocol, extensions, states
_ID = struct.Struct("!HH16s16s4x")  # inet_diag_sockid, up to its cookie: ports, addresses, any interface
_ANY_COOKIE, _ALL_STATES = b"\xff" * 8, 0xFFFFFFFF
_ANSWER = struct.Struct("=4x48x12xII")  # inet_diag_msg: the user and the inode come after expiry and queues

Address = tuple[str, int | None]


def user_of(client: Address, server: Address) -> int | None:
    """Return the id of the user whose process has the client's socket. client, server: of a TCP connection on this machine.

    None if nobody has it any more: the kernel says 0, which is root, for a socket that was closed. Raises OSError where the
    kernel has no such socket, or no such diagnostics.
    """
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    source, destination = (socket.inet_pton(family, host) for host, _ in (client, server))
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES)
    request += _ID.pack(client[1] or 0, server[1] or 0, source, destination) + _ANY_COOKIE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + request)
        answer = kernel.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        raise OSError(-struct.unpack_from("=i", answer, _HEADER.size)[0], "the kernel does not show the socket")
    user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    return user if inode else None


@cache
def shows_users() -> bool:
    """Return True if this machine's kernel can say whose sockets are connected. Linux nearly always can."""
    if not hasattr(socket, "AF_NETLINK"):
        return False
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        try:
            return user_of(client.getsockname(), client.getpeername()) == os.geteuid()
        except OSError:
            return False
