"""The HTTP server of a process: uvicorn with our limits of connections."""

import resource
import socket
import sys

import uvicorn
from fastapi import FastAPI

from octet.service.processes.connections import Listeners, protocol_with
from octet.service.processes.startup import SHUTDOWN_S
from octet.service.settings import Settings
from octet.service.tls import Certificate

ACCEPTED_AT_ONCE = 16
"""Connections that the event loop accepts in one turn. Our limits see them some turns later, and until then each has a
descriptor: uvicorn's 2,048 at once take more than a process with 1,024 has."""
_WAITING = 2048
THREAD_TURN_S = 0.0005
"""Seconds that a thread that computes may hold the interpreter while others wait. At Python's 5 ms a request waits that long
for the dispatcher's thread: one job in a hundred took 5.2 ms to read, and takes 2.1 with this."""


class _Server(uvicorn.Server):
    """A server on one socket, and on that of the internal address if it is given a second one."""

    def __init__(self, config: uvicorn.Config, listeners: Listeners) -> None:
        super().__init__(config)
        self._listeners = listeners

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for internal in (sockets or [])[1:]:
            self._listeners.internal_port = internal.getsockname()[1]
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_WAITING)  # asyncio has it hold no more connections than are accepted at once


def http_server(app: FastAPI, settings: Settings, *, is_internal: bool = False) -> uvicorn.Server:
    """Make the server of an app. It listens once it is run.

    is_internal: its one socket is that of the internal address.
    """
    sys.setswitchinterval(THREAD_TURN_S)
    listeners = Listeners.of(settings, raise_descriptor_limit(), is_internal=is_internal)
    certificate = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        certificate = Certificate(settings.tls_certificate, settings.tls_key)
    config = uvicorn.Config(
        app,
        http=protocol_with(listeners, certificate),  # type: ignore[arg-type]  # it is called and nothing else
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here asks for the client's address or scheme behind a proxy
        timeout_graceful_shutdown=SHUTDOWN_S,
        backlog=ACCEPTED_AT_ONCE,
    )
    return _Server(config, listeners)


def raise_descriptor_limit() -> int:
    """Let this process have as many open files and sockets as the operating system allows it; return that number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
