"""Shortcuts: answers in front of FastAPI's routes for requests that come often and are as usual.

FastAPI finds a route, solves its dependencies and checks its answer in Python for each request. A shortcut reads what it
needs from the request itself. Where anything is unusual (another header, an unknown token, a body that is not valid) it
leaves the request to the route that it stands for, so every refusal has one origin and the OpenAPI document one description.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.problems import expected


@dataclass
class Usual:
    """A request that a shortcut may answer. `path_params` are the variable parts of its path."""

    scope: Scope
    body: bytes
    path_params: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _headers(self) -> dict[bytes, bytes]:
        # Of a name that comes twice the first counts, as in FastAPI.
        return dict(reversed(self.scope["headers"]))

    def header(self, name: bytes) -> str | None:
        """Return a header's value, or None without it. name: in lower case."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def again(self, body: bytes, num_bytes: int) -> "Usual":
        """Make a request with the same head, but for the length of its body. body: what has come of it."""
        other = Usual(self.scope, body, self.path_params)
        other._headers = self._headers | {b"content-length": b"%d" % num_bytes}
        return other

    @property
    def query(self) -> dict[str, str] | None:
        """The query's parameters; None if one comes twice."""
        pairs = parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        query = dict(pairs)
        return query if len(query) == len(pairs) else None

    @property
    def is_json(self) -> bool:
        return self._headers.get(b"content-type") == b"application/json"

    @property
    def num_bytes(self) -> int | None:
        """The length of the body as its header has it; None without that header."""
        value = self.header(b"content-length")
        return None if value is None else int(value)


class Direct(Protocol):
    """Answers requests of one kind where the HTTP server has parsed them, before ASGI."""

    def matches(self, method: bytes, url: bytes) -> dict[str, str] | None:
        """Return the variable parts of the path of a request of this kind, or None for another request."""

    def takes(self, usual: Usual) -> bool:
        """Return True if the head of a request is usual. Its body, which has not come yet, is held in memory then."""

    def ask(self, usual: Usual, answer: Callable[[Response | bytes], None]) -> bool:
        """Begin to answer a whole request, and call `answer` later; bytes are the JSON of an answer with 200.

        Returns False, and does nothing, if it is not usual.
        """


Answer = Callable[[Usual], Awaitable[Response | None]]
"""Answers a request, or returns None to leave it to the route. Errors are answered as those of the route."""


class Shortcut:
    """A shortcut to a route."""

    def __init__(self, route: Route, answer: Answer, *, takes_query: bool = False) -> None:
        """takes_query: `answer` looks at the query of a request; otherwise a request that has one is left to the route."""
        self._route = route
        self._answer = answer
        self._takes_query = takes_query
        (self._method,) = (route.methods or set()) - {"HEAD"}
        self._path = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route.path))

    def matches(self, scope: Scope) -> dict[str, str] | None:
        """Return the variable parts of the path of a request for this route, or None for another request."""
        if scope["method"] != self._method or (scope["query_string"] and not self._takes_query):
            return None
        path = self._path.fullmatch(scope["path"])
        return path.groupdict() if path else None

    async def handle(self, scope: Scope, path_params: dict[str, str], body: bytes) -> Response | None:
        """Answer a request, or return None to leave it to the route. Errors that the routes expect are answered as theirs."""
        scope["route"] = self._route
        try:
            answer = await self._answer(Usual(scope, body, path_params))
        except Exception as error:
            answer = expected(Request(scope), error)
            if answer is None:
                raise
        if answer is None:
            del scope["route"]
        return answer


class Shortcuts:
    """Middleware: answers the requests of the shortcuts. Every check that precedes routes must be outside of it."""

    def __init__(self, app: ASGIApp, shortcuts: Sequence[Shortcut]) -> None:
        self._app = app
        self._shortcuts = shortcuts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for shortcut in self._shortcuts if scope["type"] == "http" else ():
            path_params = shortcut.matches(scope)
            if path_params is None:
                continue
            if scope["method"] == "GET":
                body = b""
            else:
                message = await receive()  # `LimitBodies` has read the whole body
                body, receive = message.get("body", b""), _again(message, receive)
            answer = await shortcut.handle(scope, path_params, body)
            if answer is not None:
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _again(message: Message, receive: Receive) -> Receive:
    waiting = [message]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


def route_of(router: APIRouter, operation_id: str) -> Route:
    """Return the route of a router with this operation id."""
    found = [route for route in router.routes if getattr(route, "operation_id", None) == operation_id]
    assert isinstance(found[0], Route)
    return found[0]
