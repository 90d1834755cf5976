"""Servers of socketserver that run beside a test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from typing import TypeVar

AnyServer = TypeVar("AnyServer", bound=BaseServer)


@contextmanager
def running(server: AnyServer) -> Iterator[AnyServer]:
    """Serve in a thread until the end of the block, and close the server then."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
