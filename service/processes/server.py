"""The HTTP server of a process: uvicorn with our limits of connections."""

import resource

import uvicorn
from fastapi import FastAPI

from service.processes.connections import Connections
from service.processes.direct import direct_protocol
from service.processes.startup import SHUTDOWN_S
from service.settings import Settings


def http_server(app: FastAPI, settings: Settings) -> uvicorn.Server:
    """Make the server of an app. It listens once it is run."""
    connections = Connections.of(settings, raise_descriptor_limit())
    protocol = direct_protocol(connections, app.state.direct)
    config = uvicorn.Config(
        app,
        http=protocol,
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here asks for the client's address or scheme behind a proxy
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return uvicorn.Server(config)


def raise_descriptor_limit() -> int:
    """Let this process have as many open files and sockets as the operating system allows it; return that number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
