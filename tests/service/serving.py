"""A server of the app in a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from octet.service.app import create_app
from octet.service.db.engine import Database
from octet.service.processes.server import http_server
from octet.service.processes.startup import listening
from octet.service.settings import Settings


@contextmanager
def serving(settings: Settings, database: Database) -> Iterator[tuple[uvicorn.Server, int]]:
    """Serve, and close the database afterwards. Yields the server and its port."""
    with listening(settings) as listeners:
        server = http_server(create_app(settings, database=database), settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": listeners})
        thread.start()
        try:
            yield server, listeners[0].getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
            database.close()
