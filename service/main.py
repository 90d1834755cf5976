"""The process behind `octet serve`: API, dispatcher and a local Ray, on SQLite unless told otherwise.

Composition only. Nothing here decides anything, and nothing runs at import; Ray is imported once the environment that it
reads at import is set.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError

from service.app import create_app
from service.cluster.launcher import Launcher
from service.cluster.local_ray import LocalRay, hold_serve_lock
from service.db.engine import Database
from service.dispatcher import Dispatcher
from service.settings import Settings, default_pool

_SHUTDOWN_S = 3
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}

logger = logging.getLogger(__name__)


def serve(
    *,
    host: str,
    port: int,
    data_dir: Path,
    api_key_file: Path | None = None,
    pools_file: Path | None = None,
    data_roots: tuple[Path, ...] = (),
    slots: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises ValueError for settings that cannot work, OSError for a port and RuntimeError for a folder that another has.
    """
    given: dict[str, Any] = {"host": host, "port": port, "data_dir": data_dir.resolve()}
    given |= {"api_keys_file": api_key_file} if api_key_file else {}
    given |= {"data_roots": data_roots} if data_roots else {}
    given |= {"pools_file": pools_file} if pools_file else {}
    given |= {"pools": (default_pool(slots),)} if slots and not pools_file else {}
    settings = checked_settings(given)
    # Before any thread is started: all of them inherit it, and `_run` alone hears the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    log_to_stderr()
    with listening(settings) as listener:
        hold_serve_lock(settings.data_dir)
        database = Database(settings.effective_database_url)
        database.migrate()
        with _local_cluster(settings) as launcher:
            _run(settings, database, launcher, listener)
        database.close()


def log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _run(settings: Settings, database: Database, launcher: Launcher, listener: socket.socket) -> None:
    """Serve in a thread and wait for a signal here. Ray installs handlers that print a stack trace; none runs this way."""
    dispatcher = Dispatcher(database, launcher, settings)
    app = create_app(settings, database=database, wake=dispatcher.wake)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S)
    server = uvicorn.Server(config)

    def serve_until_told() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # should it end by itself, the wait below ends too

    thread = threading.Thread(target=serve_until_told, name="octet-http")
    dispatcher.start()
    thread.start()
    try:
        logger.info("Octet listens on http://%s:%d, data in %s", settings.host, settings.port, settings.data_dir)
        received = signal.sigwait(_STOP_SIGNALS)
        logger.info("stopping on %s", signal.Signals(received).name)
    finally:
        server.should_exit = True
        thread.join()
        dispatcher.stop()


def checked_settings(given: dict[str, Any]) -> Settings:
    """Settings from these and from OCTET_* variables. Raises ValueError in words that say what to change."""
    try:
        return Settings(**given)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, detail['loc']))} {detail['msg']}".strip() for detail in error.errors()]
        raise ValueError("; ".join(problems).replace("Value error, ", "")) from error


@contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """The socket is bound before anything else is started, so a taken port costs nothing."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise OSError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror}. Choose another with --port."
            ) from error
        listener.listen(256)
        yield listener


@contextmanager
def _local_cluster(settings: Settings) -> Iterator[Launcher]:
    """A launcher on the embedded Ray, which is ended with the server; a killed server leaves it running for a while."""
    local = LocalRay(settings.data_dir, settings.pools)
    os.environ.update(local.environment())
    from service.cluster.ray_launcher import RayLauncher

    launcher = RayLauncher(local.ensure, settings.pools)
    try:
        yield launcher
    finally:
        launcher.close()
        local.stop()
