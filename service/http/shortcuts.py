"""Shortcuts: routes in front of FastAPI's for requests that come often and are as usual.

FastAPI finds a route, solves its dependencies and checks its answer in Python for each request. A shortcut reads what it
needs from the request itself. Where anything is unusual (another header, an unknown token, a body that is not valid) it
leaves the request to the route that it stands for, so every refusal has one origin and the OpenAPI document one description.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import parse_qsl

from fastapi import APIRouter, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Message, Receive, Scope, Send

_LEFT = "octet.left_to_route"


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

    @property
    def query(self) -> dict[str, str] | None:
        """The query's parameters; None if one comes twice."""
        pairs = parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        query = dict(pairs)
        return query if len(query) == len(pairs) else None

    @property
    def is_json(self) -> bool:
        return self._headers.get(b"content-type") == b"application/json"


Answer = Callable[[Usual], Awaitable[Response | None]]
"""Answers a request, or returns None to leave it to the route. Errors are answered as those of the route."""


class Shortcut(BaseRoute):
    """A shortcut to a route."""

    def __init__(self, route: Route, answer: Answer, *, takes_query: bool = False) -> None:
        """takes_query: `answer` looks at the query of a request; otherwise a request that has one is left to the route."""
        self._route = route
        self._answer = answer
        self._takes_query = takes_query
        (self._method,) = (route.methods or set()) - {"HEAD"}
        self._path = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route.path))

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or scope["method"] != self._method or _LEFT in scope:
            return Match.NONE, {}
        if scope["query_string"] and not self._takes_query:
            return Match.NONE, {}
        path = self._path.fullmatch(scope["path"])
        return (Match.FULL, {"path_params": path.groupdict(), "route": self._route}) if path else (Match.NONE, {})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages: list[Message] = []
        if self._method != "GET":
            messages.append(await receive())  # the middleware has read the whole body
        body = messages[0].get("body", b"") if messages else b""
        answer = await self._answer(Usual(scope, body, scope["path_params"]))
        if answer is not None:
            await answer(scope, receive, send)
            return
        scope[_LEFT] = True
        scope["path_params"] = {}

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        await scope["router"](scope, again, send)


def route_of(router: APIRouter, operation_id: str) -> Route:
    """Return the route of a router with this operation id."""
    found = [route for route in router.routes if getattr(route, "operation_id", None) == operation_id]
    assert isinstance(found[0], Route)
    return found[0]
