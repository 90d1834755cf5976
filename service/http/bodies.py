"""Bodies of requests: how large they may be, who may send them, and how much of them is held in memory.

A body is refused as early as possible: by its declared length, then for a missing or unknown key or token, then as it grows.
All bodies together are limited too. A body that would exceed that limit takes the place of the one that has been incomplete
for longest, so clients that never finish theirs cannot fill the memory or keep others out.
"""

import re
from collections.abc import Callable
from functools import cached_property

import anyio
from anyio.to_thread import run_sync
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.deps import tenant_of
from service.errors import NotReady, PayloadTooLarge, ServiceError, Unauthenticated
from service.http.problems import render
from service.settings import Settings

MAX_BODY_BYTES = 1 << 20
MAX_REPORT_BYTES = 8 << 20
MAX_STRANGER_BYTES = 64 << 10
"""The most that is read for a caller who is not known yet."""
MAX_HELD_BYTES = 64 << 20

_REPORTS = re.compile(r"/internal/v1/attempts/([^/]+)/reports")

KnowsAttempt = Callable[[str, str], bool]
"""Takes an attempt's id and a token; returns True if the token is that attempt's."""


class LimitBodies:
    """Middleware: reads a whole body before the route sees any of it, or answers 401, 413 or 503."""

    def __init__(self, app: ASGIApp, settings: Settings, knows_attempt: KnowsAttempt) -> None:
        self._app = app
        self._settings = settings
        self._knows_attempt = knows_attempt
        self._held = _HeldBodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in {"GET", "HEAD"}:
            await self._app(scope, receive, send)
            return
        body = _Body()
        try:
            is_whole = await self._read(body, scope, receive)
            if is_whole:
                await self._app(scope, _replayed(bytes(body.content), receive), send)
        except ServiceError as error:
            await render(error, scope["path"])(scope, receive, send)
        finally:
            self._held.drop(body)

    async def _read(self, body: "_Body", scope: Scope, receive: Receive) -> bool:
        """Read a body. Returns False if the client went away."""
        headers = dict(scope["headers"])
        declared = int(headers.get(b"content-length", b"0"))
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        report = _REPORTS.fullmatch(scope["path"])
        is_known = scope["path"].startswith("/v1/")
        if is_known:
            tenant_of(self._settings, authorization)
        limit = MAX_REPORT_BYTES if report else MAX_BODY_BYTES if is_known else MAX_STRANGER_BYTES

        async def received() -> bool | None:
            """Receive one message. Returns True if the body is whole, False if the client went away, or None."""
            nonlocal is_known
            if max(declared, len(body.content)) > limit:
                raise PayloadTooLarge(f"the body is larger than {limit} bytes, the limit of this route")
            if report and not is_known and max(declared, len(body.content)) > MAX_STRANGER_BYTES:
                await self._require_token(report[1], authorization)
                is_known = True
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            self._held.grow(body, message.get("body", b""))
            body.is_whole = not message.get("more_body", False) and len(body.content) <= limit
            return True if body.is_whole else None

        # Nothing is held of the body before its first message, which is nearly always the only one.
        first = await received()
        if first is not None:
            return first
        with body.reading:
            while True:
                another = await received()
                if another is not None:
                    return another
        raise NotReady("too many bodies are incomplete, and this one for longest; send it again")

    async def _require_token(self, attempt_id: str, authorization: str) -> None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not await run_sync(self._knows_attempt, attempt_id, token):
            raise Unauthenticated(f"a body of more than {MAX_STRANGER_BYTES} bytes is read for the attempt's token only")


class _Body:
    """The body of one request, as far as it has arrived."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.is_whole = False

    @cached_property
    def reading(self) -> anyio.CancelScope:
        """The scope in which the rest of the body is read."""
        return anyio.CancelScope()


class _HeldBodies:
    """All bodies in memory, oldest first."""

    def __init__(self) -> None:
        self._bodies: dict[_Body, None] = {}
        self._num_bytes = 0

    def grow(self, body: _Body, chunk: bytes) -> None:
        """Add a chunk, and end older incomplete bodies if there is no room. Raises NotReady if that does not suffice."""
        self._bodies[body] = None
        body.content += chunk
        self._num_bytes += len(chunk)
        while self._num_bytes > MAX_HELD_BYTES:
            oldest = next((other for other in self._bodies if not other.is_whole), None)
            if oldest is None or oldest is body:
                raise NotReady("the bodies of other requests fill the memory that is kept for them; send it again")
            self.drop(oldest)
            oldest.reading.cancel()

    def drop(self, body: _Body) -> None:
        if body in self._bodies:
            del self._bodies[body]
            self._num_bytes -= len(body.content)
        body.content = bytearray()


def _replayed(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
