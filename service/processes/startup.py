"""Start the processes: checked settings, a log, a socket that listens, a database that answers."""

import gc
import logging
import os
import random
import secrets
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError, OperationalError

from octet.api_schemas.keys import local_key_file
from octet.service.cluster.ray.embedded import hold_serve_lock
from octet.service.db.engine import LOCK_TIMEOUT_S, Database
from octet.service.logs import JsonLines, LogFormat
from octet.service.processes.sockets import bound
from octet.service.settings import Settings, host_and_port

SHUTDOWN_S = 3
PRIVATE_UMASK = 0o077
_LONGEST_WAIT_S = 5.0
_LINE_OF_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

logger = logging.getLogger(__name__)


def checked_settings(given: dict[str, Any]) -> Settings:
    """Read settings from `given` and from OCTET_* variables. Raises ValueError in words that say what to change."""
    try:
        return Settings(**given)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, detail['loc']))} {detail['msg']}".strip() for detail in error.errors()]
        raise ValueError("; ".join(problems).replace("Value error, ", "")) from error


def cluster_settings(database_url_file: Path | None, log_format: LogFormat | None = None) -> Settings:
    """Read the settings of cluster mode from the environment; the file, if given, holds the database URL.

    Raises ValueError without a database that several processes can share.
    """
    url = _read(database_url_file) if database_url_file else None
    settings = checked_settings(({"database_url": url} if url else {}) | ({"log_format": log_format} if log_format else {}))
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


def private_folder(folder: Path, *, lets_others_pass: bool = False) -> None:
    """Make the data folder ours alone: 0700, and 0600 for the files in it; from now on this process creates nothing else.

    lets_others_pass: 0711, for ranks that run as users of their own, on their way to the folders of their jobs. They see no
    list of either folder, and no file of the first.

    Raises ValueError for a folder that another user owns or can write to: links in it could lead our writes anywhere.
    """
    os.umask(PRIVATE_UMASK)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise ValueError(
            f"the data folder {str(folder)!r} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}. "
            "Choose another with --data-dir, or give it to this user with chown."
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"other users can write to the data folder {str(folder)!r} (mode {stat.S_IMODE(found.st_mode):04o}). Look for "
            f"files that are not yours, then run: chmod go-w {str(folder)!r}"
        )
    folder.chmod(0o711 if lets_others_pass else 0o700)
    if lets_others_pass:
        (folder / "jobs").mkdir(exist_ok=True)
        (folder / "jobs").chmod(0o711)
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            path.chmod(0o600)


def key_of_this_user(port: int) -> str:
    """Make a key for this run of a server, and write it where clients of the same user, and of no other, read it."""
    path, key = local_key_file(port), secrets.token_hex(32)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(key)
    logger.info("this system does not say whose connections come: clients of this user send the key in %s by themselves", path)
    return key


def check_users(settings: Settings) -> None:
    """Raise ValueError unless ranks on this machine can run as the users that the pools name."""
    if os.geteuid() != 0:
        pools = ", ".join(pool.name for pool in settings.pools if pool.has_users)
        raise ValueError(
            f"pool {pools} runs ranks as users of their tenants, for which `octet serve` has to run as root; it runs as user "
            f"{os.geteuid()}. Start it as root, or remove tenants.….user from the pool"
        )
    for what, place in (("the data folder", settings.data_dir), ("Python", Path(sys.base_prefix)), ("Octet", Path(__file__))):
        closed = next((each for each in reversed(place.resolve().parents) if not _lets_others_pass(each)), None)
        if closed is not None:
            raise ValueError(
                f"ranks that run as users of their tenants do not reach {what} at {place}: others cannot pass through "
                f"{closed}. Run: chmod o+x {closed}, or choose another place for it"
            )


def _lets_others_pass(folder: Path) -> bool:
    return not folder.exists() or bool(folder.stat().st_mode & stat.S_IXOTH)


def freeze_what_is_there() -> None:
    """Leave all present objects out of the collector's work; call it once everything is imported and built.

    They stay until the process ends, and a full collection takes 30 to 100 ms with them, in which no request is answered.
    """
    gc.collect()
    gc.freeze()


def log_to_stderr(log_format: LogFormat = "text") -> None:
    """Send the log of the whole process to stderr, from INFO upwards. Alembic's lines about its plugins are left out.

    In JSON, Python's warnings are lines of the log too.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else logging.Formatter(_LINE_OF_TEXT))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.captureWarnings(log_format == "json")
    logging.getLogger("alembic").setLevel(logging.WARNING)


def end_by_exception() -> None:
    """Let SIGTERM and SIGINT raise SystemExit in the main thread, so that `finally` blocks run during any wait.

    uvicorn takes the signals over while it serves, and raises them again once it has shut down.
    """

    def end(_number: int, _frame: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


@contextmanager
def listening(settings: Settings, *, is_internal: bool = False) -> Iterator[list[socket.socket]]:
    """Bind the API's socket, and that of the internal address if there is one. This comes before anything else is started, so
    a taken port costs nothing.

    is_internal: bind that of the internal address alone. Raises OSError for an address that cannot be bound.
    """
    with ExitStack() as stack:
        listeners = [] if is_internal else [stack.enter_context(bound(settings.host, settings.port))]
        if settings.internal_address:
            inside = bound(*host_and_port(settings.internal_address), "OCTET_INTERNAL_ADDRESS")
            listeners.append(stack.enter_context(inside))
        for listener in listeners:
            listener.listen(256)
        yield listeners


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


def database_of_one_machine(settings: Settings, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> Database:
    """Open and migrate the database of `octet serve`.

    lock_timeout_s: the longest wait for a lock that another process holds. Raises RuntimeError, with what to change, for a
    database that cannot be written: locked, on a full disk, damaged, or away.
    """
    database = Database(settings.effective_database_url, lock_timeout_s=lock_timeout_s)
    try:
        database.migrate()
    except DBAPIError as error:
        database.close()
        raise _unusable(database, error) from error
    return database


@contextmanager
def stored_database(data_dir: Path, database_url_file: Path | None, *, alone: bool = False) -> Iterator[Database]:
    """Open the database that the servers of a folder or of a URL use; OCTET_* variables name it as they do for a server.

    alone: no `octet serve` may use the folder. Raises ValueError for settings that cannot work, and RuntimeError for a folder
    in use or a database that does not answer.
    """
    given: dict[str, Any] = {"data_dir": data_dir.resolve()}
    given |= {"database_url": _read(database_url_file)} if database_url_file else {}
    database = Database(checked_settings(given).effective_database_url)
    os.umask(PRIVATE_UMASK)
    if alone and database.path is not None:
        private_folder(data_dir)
        hold_serve_lock(data_dir)
    try:
        yield database
    except DBAPIError as error:
        raise _unusable(database, error) from error
    finally:
        database.close()


def _unusable(database: Database, error: DBAPIError) -> RuntimeError:
    """Say what the database answered and what to change."""
    reason = str(error.orig).splitlines()[0]
    return RuntimeError(f"the database {database.name} cannot be used: {reason}. {_advice(reason.lower())}")


def _advice(reason: str) -> str:
    advice = {
        "locked": "Another process writes to it: end that one, then start again.",
        "full": "Free some space on its disk, then start again; nothing that was accepted is lost.",
        "i/o error": "Look at its disk: it may be full or broken.",
        "readonly": "Give this user the right to write to the file and to its folder, or choose another with --data-dir.",
        "unable to open": "Look at the rights and the free space of its folder, or choose another with --data-dir.",
        "malformed": "The file is damaged: put back a copy of it, or choose another folder with --data-dir.",
        "not a database": "Another program wrote the file: move it away, or choose another folder with --data-dir.",
    }
    return next((change for word, change in advice.items() if word in reason), "Check OCTET_DATABASE_URL and its server.")
