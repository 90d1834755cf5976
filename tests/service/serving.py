"""A server of the app in a thread, which notes what reaches ASGI."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from service.app import create_app
from service.db.engine import Database
from service.http.bodies import LimitBodies
from service.processes.server import http_server
from service.processes.startup import listening
from service.settings import Settings


@contextmanager
def serving(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[uvicorn.Server, int, list[str]]]:
    """Serve, and close the database afterwards. Yields the server, its port, and the paths of requests that reach ASGI."""
    through_asgi: list[str] = []
    reach = LimitBodies.__call__

    async def watched(self: LimitBodies, scope: Any, *rest: Any) -> None:
        if scope["type"] == "http":
            through_asgi.append(scope["path"])
        await reach(self, scope, *rest)

    monkeypatch.setattr(LimitBodies, "__call__", watched)
    with listening(settings) as listener:
        server = http_server(create_app(settings, database=database), settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield server, listener.getsockname()[1], through_asgi
        finally:
            server.should_exit = True
            thread.join()
            database.close()
