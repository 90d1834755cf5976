"""What the processes share on their way up: checked settings, a log, a socket that listens, a database that answers."""

import logging
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy.exc import OperationalError

from service.db.engine import Database
from service.settings import Settings

SHUTDOWN_S = 3
_LONGEST_WAIT_S = 5.0

logger = logging.getLogger(__name__)


def checked_settings(given: dict[str, Any]) -> Settings:
    """Read settings from `given` and from OCTET_* variables. Raises ValueError in words that say what to change."""
    try:
        return Settings(**given)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, detail['loc']))} {detail['msg']}".strip() for detail in error.errors()]
        raise ValueError("; ".join(problems).replace("Value error, ", "")) from error


def cluster_settings(database_url_file: Path | None) -> Settings:
    """Read the settings of cluster mode from the environment; the file, if given, holds the database URL.

    Raises ValueError without a database that several processes can share.
    """
    url = _read(database_url_file) if database_url_file else None
    settings = checked_settings({"database_url": url} if url else {})
    if not settings.database_url.startswith("postgresql"):
        raise ValueError(
            "cluster mode needs a PostgreSQL database: set OCTET_DATABASE_URL=postgresql://…, or OCTET_DATABASE_URL_FILE to a "
            "file with that URL. For one machine without PostgreSQL use `octet serve`."
        )
    return settings


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"the file of the database URL, {str(path)!r}, cannot be read: {error.strerror}") from error


def log_to_stderr() -> None:
    """Send the log of the whole process to stderr, from INFO upwards."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def end_by_exception() -> None:
    """Let SIGTERM and SIGINT raise SystemExit in the main thread, so that `finally` blocks run during any wait.

    uvicorn takes the signals over while it serves, and raises them again once it has shut down.
    """

    def end(_number: int, _frame: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


@contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """Bind the API's socket. This comes before anything else is started, so a taken port costs nothing.

    Raises OSError for an address that cannot be bound.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With protocol 0 asyncio would not know that this is TCP and leave Nagle's algorithm on: 44 ms for each answer.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise OSError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror}. Choose another with --port."
            ) from error
        listener.listen(256)
        yield listener


def database_that_answers(settings: Settings) -> Database:
    """Open and migrate the database; while it is away, try again every few seconds."""
    database = Database(settings.effective_database_url)
    wait_s = 0.5
    while True:
        try:
            database.migrate()
            return database
        except OperationalError as error:
            first_line = str(error.orig).splitlines()[0]
            logger.warning("the database does not answer; trying again in about %.1f s: %s", wait_s, first_line)
            time.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(_LONGEST_WAIT_S, 2 * wait_s)
