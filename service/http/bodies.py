"""Bodies of requests: how large they may be, who may send them, and how much of them is held in memory.

A body is refused as early as possible: by its declared length, then for a missing or unknown key or token, then as it grows.
All bodies together are limited too. A body that would exceed that limit takes the place of the one that has been incomplete
for longest, so clients that never finish theirs cannot fill the memory or keep others out.
"""

import json
import re
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi import Request
from pydantic import TypeAdapter, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octet.api_schemas import Contract, Violation
from octet.api_schemas.job import MAX_SPEC_BYTES, MAX_SPEC_VALUES
from octet.service.access.principal import Principal
from octet.service.access.rates import COST_OF_VIOLATION
from octet.service.deps import context_of, principal_of
from octet.service.errors import (
    MOST_VIOLATIONS,
    InvalidJson,
    InvalidRequest,
    NotReady,
    PayloadTooLarge,
    ServiceError,
    Unauthenticated,
)
from octet.service.http.problems import DATABASE_AWAY, answer_error, invalid

MAX_BODY_BYTES = MAX_SPEC_BYTES
MAX_REPORT_BYTES = 8 << 20
MAX_STRANGER_BYTES = 64 << 10
"""The most that is read of reports before an attempt's token is known."""
MAX_HELD_BYTES = 64 << 20

_JSON = re.compile(r"application/([^;]*\+)?json\s*(;.*)?", re.IGNORECASE)
_REPORTS = re.compile(r"/internal/v1/attempts/([^/]+)/reports")

Read = TypeVar("Read", bound=Contract)
Parsed = TypeVar("Parsed")
Authenticate = Callable[[str], Awaitable[Principal]]
"""Takes the header Authorization and returns the principal; raises Unauthenticated without one."""
VerifyToken = Callable[[str, str], Awaitable[bool]]
"""Takes an attempt's id and a token; returns True if the token is that attempt's."""


class LimitBodies:
    """Middleware: reads a whole body before the route sees any of it, or answers 401, 413 or 503."""

    def __init__(self, app: ASGIApp, authenticate: Authenticate, verify_token: VerifyToken) -> None:
        self._app = app
        self._authenticate = authenticate
        self._verify_token = verify_token
        self._held = _HeldBodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in {"GET", "HEAD"}:
            await self._app(scope, receive, send)
            return
        body = _Body()
        try:
            is_whole = await self._read(body, scope, receive)
            if is_whole:
                scope.setdefault("state", {})["num_body_bytes"] = len(body.content)
                await self._app(scope, _replayed(bytes(body.content), receive), send)
        except (ServiceError, *DATABASE_AWAY) as error:
            await answer_error(Request(scope), error)(scope, receive, send)
        finally:
            self._held.drop(body)

    async def _read(self, body: "_Body", scope: Scope, receive: Receive) -> bool:
        """Read a body. Returns False if the client went away."""
        headers = dict(scope["headers"])
        declared = int(headers.get(b"content-length", b"0"))
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        report = _REPORTS.fullmatch(scope["path"])
        is_known = False
        if scope["path"].startswith("/v1/"):
            scope.setdefault("state", {})["principal"] = await self._authenticate(authorization)
        limit = MAX_REPORT_BYTES if report else MAX_BODY_BYTES

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
        if scheme.lower() != "bearer" or not await self._verify_token(attempt_id, token):
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


def body_of(contract: type[Contract]) -> dict[str, Any]:
    """Describe the body of a route that reads it with `read_json`, for the OpenAPI document."""
    schema = {"$ref": f"#/components/schemas/{contract.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


PATCH_OF_SPEC = {
    "requestBody": {
        "required": False,
        "description": "a JSON merge patch (RFC 7396) of the spec: null removes a field, so that its default holds",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


async def read_json(request: Request, contract: type[Read]) -> Read:
    """Parse and validate the body of a request in one go, from its bytes. Raises InvalidJson or InvalidRequest.

    Its values are counted first: to refuse 80,000 wrong ones had held up every other request for seconds.
    """
    body = await request.body()
    _refuse_many_values(body)
    return await _parse(request, body, contract, contract.model_validate_json)


async def read_patch(request: Request, contract: type[Contract]) -> dict[str, Any]:
    """Read the body of a request as a JSON merge patch for a document of `contract`; no body is an empty patch."""
    body = await request.body()
    if not body:
        return {}
    _refuse_many_values(body)
    return await _parse(request, body, contract, _ANY_MAPPING.validate_json)


async def _parse(request: Request, body: bytes, contract: type[Contract], parse: Callable[[bytes], Parsed]) -> Parsed:
    """Parse a body as `parse_json` does, and explain what is wrong in a thread, one body at a time.

    A hundred violations take 10 ms, in which the event loop would answer nobody. They are charged for before that.
    """
    _require_json(body, request.headers.get("content-type", ""), contract)
    try:
        return parse(body)
    except ValidationError as error:
        found = error
    context = context_of(request)
    context.rates.charge(principal_of(request), COST_OF_VIOLATION * min(found.error_count(), MOST_VIOLATIONS))
    raise await run_sync(_explained, found, contract, limiter=context.explaining) from found


_ANY_MAPPING = TypeAdapter(dict[str, Any])


def _refuse_many_values(body: bytes) -> None:
    """Raise InvalidRequest for a document of more than `MAX_SPEC_VALUES` values. The parser refuses what is no JSON."""
    if len(body) <= MAX_SPEC_VALUES:  # a value takes a byte at least
        return
    try:
        # Numbers count as one value each, so they are not parsed: Python refuses those of 4,300 digits.
        waiting = [json.loads(body, parse_int=len, parse_float=len)]
    except (ValueError, RecursionError):
        return
    num_values = 0
    while waiting:
        value = waiting.pop()
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
        num_values += 1
        if num_values + len(waiting) + len(inner) > MAX_SPEC_VALUES:
            message = "Remove what does not belong to the job: it has some dozens."
            allowed = f"at most {MAX_SPEC_VALUES} values: mappings, lists, keys and scalars"
            violation = Violation(field="", got="more than that", allowed=allowed, message=message)
            raise InvalidRequest.of((violation,))
        waiting += inner


def parse_json(body: bytes, content_type: str, contract: type[Contract], parse: Callable[[bytes], Parsed]) -> Parsed:
    """Parse a body with `parse`, whose ValidationError explains what the contract refuses."""
    _require_json(body, content_type, contract)
    try:
        return parse(body)
    except ValidationError as error:
        raise _explained(error, contract) from error


def _require_json(body: bytes, content_type: str, contract: type[Contract]) -> None:
    if not body:
        raise invalid([{"type": "missing", "loc": (), "msg": "Field required", "input": None}], contract)
    if not _JSON.fullmatch(content_type):
        raise InvalidJson("the body is not JSON; send Content-Type: application/json")


def _explained(error: ValidationError, contract: type[Contract]) -> ServiceError:
    return invalid(error.errors(include_url=False), contract)


async def whole_body(receive: Receive) -> bytes:
    """Receive the body of a request that `LimitBodies` has let through: all of it comes in one message."""
    message = await receive()
    body: bytes = message.get("body", b"")
    return body


def _replayed(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
