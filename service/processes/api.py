"""The processes behind `octet api` and `octet ingest`, in cluster mode.

Both are stateless, so any number of them may run. All share one PostgreSQL database, and wait for it while it is away.
An ingest process is an api that listens on the internal address alone: it answers ranks and Prometheus, and no request of a
user takes its turns of the event loop, its threads or its connections of the database.
"""

import logging
import os
from pathlib import Path

from octet.service.app import create_app
from octet.service.jobs.check_processes import CheckProcesses
from octet.service.logs import LogFormat
from octet.service.processes.schema_watch import ending_on_newer_schema
from octet.service.processes.server import http_server
from octet.service.processes.startup import (
    PRIVATE_UMASK,
    cluster_settings,
    database_that_answers,
    end_by_exception,
    freeze_what_is_there,
    listening,
    log_to_stderr,
)
from octet.service.settings import Settings

logger = logging.getLogger(__name__)


def api(*, database_url_file: Path | None = None, log_format: LogFormat | None = None) -> None:
    """Serve the API until SIGTERM or SIGINT. Raises ValueError for settings that cannot work, OSError for the port.

    Raises NewerSchema, a RuntimeError, before and while it serves, once a newer version of Octet has migrated the database.
    """
    _serve(cluster_settings(database_url_file, log_format))


def ingest(*, database_url_file: Path | None = None, log_format: LogFormat | None = None) -> None:
    """Serve reports, health and metrics on the internal address, as `api` serves the API. Raises as that does."""
    settings = cluster_settings(database_url_file, log_format)
    if not settings.internal_address:
        raise ValueError("set OCTET_INTERNAL_ADDRESS to the HOST:PORT at which ranks report, for example 0.0.0.0:8001")
    _serve(settings, is_internal=True)


def _serve(settings: Settings, *, is_internal: bool = False) -> None:
    """is_internal: listen on the internal address alone."""
    end_by_exception()
    os.umask(PRIVATE_UMASK)
    log_to_stderr(settings.log_format)
    database = database_that_answers(settings)
    # Processes that check files start with their first check, which an ingest process never has.
    app = create_app(settings, database=database, checks=CheckProcesses() if is_internal else None)
    with listening(settings, is_internal=is_internal) as listeners:
        if is_internal:
            logger.info("reports, health and metrics are at %s://%s", settings.scheme, settings.internal_address)
        else:
            logger.info("the API listens on %s://%s:%d", settings.scheme, settings.host, settings.port)
        freeze_what_is_there()
        server = http_server(app, settings, is_internal=is_internal)
        with ending_on_newer_schema(database, lambda: setattr(server, "should_exit", True)):
            server.run(sockets=listeners)
    database.close()
