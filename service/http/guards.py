"""Checks before every route: the user who asks, the Host and Origin headers, unknown query parameters.

The headers matter to a service without keys: a web page must not reach it through its visitor's browser. The page could
use a name that resolves to 127.0.0.1 (DNS rebinding; Host shows it) or post to 127.0.0.1 itself (Origin shows it). So does
the user: other users of the machine reach its loopback too, and a job runs code as the server's user.
"""

import difflib
import ipaddress
import os
from collections.abc import Iterator
from functools import lru_cache

from fastapi import Request
from fastapi.dependencies.models import Dependant
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from octet.api_schemas import Violation
from octet.api_schemas.base import contract_in
from octet.service.errors import MOST_VIOLATIONS, InvalidRequest, ServiceError, Unauthenticated, WrongHost
from octet.service.http.problems import render

USER = "octet.user"
"""The ASGI extension that has the user at the other end of the connection, where the server asks the kernel for it."""
_ROOT = 0
_OPEN_TO_ALL = ("/healthz", "/readyz", "/internal/v1/attempts/")
"""Paths that any user of this machine may ask: without anything to learn, or with a token of their own."""


class RefuseStrangers:
    """Middleware of a service without keys, which serves the user who runs it, and root, on this machine.

    It answers 401 to others, and 421 unless Host, and Origin if present, name this machine.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._users = {_ROOT, os.geteuid()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await render(refusal, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ServiceError | None:
        headers = dict(scope["headers"])
        host, origin = headers.get(b"host", b"").decode("latin-1"), None
        if b"origin" in headers:
            origin = headers[b"origin"].decode("latin-1")
        if not is_loopback(host) or (origin is not None and not is_loopback(origin.partition("://")[2])):
            return WrongHost(f"Host {host!r}, Origin {origin!r}: without API keys only 127.0.0.1 and localhost are served")
        asking = scope.get("extensions", {}).get(USER)
        if asking is None or asking["id"] in self._users or scope["path"].startswith(_OPEN_TO_ALL):
            return None
        who = "a process that has closed its end" if asking["id"] is None else f"user {asking['id']}"
        return Unauthenticated(
            f"without API keys only user {os.geteuid()} is served, who runs this server; the request comes from {who}. "
            "Start it with --api-key-file to serve other users of this machine"
        )


async def refuse_unknown_query(request: Request) -> None:
    """Answer 422 to a query parameter that the route does not have: a mistyped filter must not be ignored."""
    if request.scope["query_string"]:
        known = list(dict.fromkeys(_query_parameters(request.scope["route"].dependant)))
        refuse_unknown(request.query_params, known)


def refuse_unknown(query: QueryParams, known: list[str]) -> None:
    """Raise InvalidRequest if a query has other parameters than the known ones."""
    unknown = [name for name in query if name not in known]
    if unknown:
        shown = unknown[:MOST_VIOLATIONS]
        violations = tuple(_unknown(name, query[name], known) for name in shown)
        raise InvalidRequest.of(violations, len(unknown) - len(shown))


def _query_parameters(dependant: Dependant) -> Iterator[str]:
    """Name what a route and its dependencies read of the query. The OpenAPI document has them too; it takes 0.5 s to build."""
    for parameter in dependant.query_params:
        model = contract_in(parameter.field_info.annotation)
        yield from [parameter.alias] if model is None else model.model_fields
    for dependency in dependant.dependencies:
        yield from _query_parameters(dependency)


def _unknown(name: str, value: str, known: list[str]) -> Violation:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    message = f"unknown query parameter {name!r}.{hint} Remove it or correct its name."
    return Violation(field=name, got=value, allowed=", ".join(known) or "no query parameters", message=message)


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return True if a Host header names this machine."""
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if name.lower() in {"localhost", "localhost."}:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
