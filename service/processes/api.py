"""The process behind `octet api`: the HTTP API alone, in cluster mode.

It is stateless, so any number of them may run. All share one PostgreSQL database, and wait for it while it is away.
"""

import logging
import os
from pathlib import Path

from octet.service.app import create_app
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

logger = logging.getLogger(__name__)


def api(*, database_url_file: Path | None = None, log_format: LogFormat | None = None) -> None:
    """Serve the API until SIGTERM or SIGINT. Raises ValueError for settings that cannot work, OSError for the port.

    Raises NewerSchema, a RuntimeError, before and while it serves, once a newer version of Octet has migrated the database.
    """
    settings = cluster_settings(database_url_file, log_format)
    end_by_exception()
    os.umask(PRIVATE_UMASK)
    log_to_stderr(settings.log_format)
    database = database_that_answers(settings)
    app = create_app(settings, database=database)
    with listening(settings) as listeners:
        logger.info("the API listens on %s://%s:%d", settings.scheme, settings.host, settings.port)
        freeze_what_is_there()
        server = http_server(app, settings)
        with ending_on_newer_schema(database, lambda: setattr(server, "should_exit", True)):
            server.run(sockets=listeners)
    database.close()
