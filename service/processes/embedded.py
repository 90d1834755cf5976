"""The process behind `octet serve`: API and dispatcher in one process, on SQLite by default, with a local Ray.

It only puts the parts together. Ray runs in processes of its own, and this one never imports it.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from octet.service.app import create_app
from octet.service.cluster.launcher import Launcher
from octet.service.cluster.ray.calls import HostedLauncher
from octet.service.cluster.ray.embedded import LocalRay, hold_serve_lock
from octet.service.db.engine import Database
from octet.service.dispatcher import Dispatcher
from octet.service.dispatcher.context import NotLeading
from octet.service.processes.connections import shows_users
from octet.service.processes.server import http_server
from octet.service.processes.startup import (
    check_users,
    checked_settings,
    database_of_one_machine,
    freeze_what_is_there,
    key_of_this_user,
    listening,
    log_to_stderr,
    private_folder,
)
from octet.service.settings import Settings, default_pool

_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
_LOOK_EVERY_S = 0.2

logger = logging.getLogger(__name__)


def serve(*, given: Mapping[str, Any], slots: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    given: settings by their names; None and an empty one leave a setting to its variable. slots: ranks at once in the pool of
    CPUs that there is without a file of pools.

    Raises ValueError for settings that cannot work or a data folder that others can write to, OSError for a port that is
    taken, and RuntimeError for a data folder that another server uses or a database that cannot be written.
    """
    given = {name: value for name, value in given.items() if value not in (None, ())}
    given |= {"pools": (default_pool(slots),)} if slots and "pools_file" not in given else {}
    settings = checked_settings(given)
    if settings.is_for_this_machine and not shows_users():
        settings = checked_settings(given | {"api_keys": (key_of_this_user(settings.port),)})
    _check_roots(given.get("data_roots", ()))
    if settings.has_users:
        check_users(settings)
    # Every thread inherits the mask, so it is set before the first one starts; `run` alone waits for the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    log_to_stderr(settings.log_format)
    with listening(settings) as listeners:
        private_folder(settings.data_dir, lets_others_pass=settings.has_users)
        former_pid = hold_serve_lock(settings.data_dir)
        database = database_of_one_machine(settings)
        with _local_cluster(settings) as launcher:
            run(settings, database, launcher, listeners, former_pid)
        database.close()


def _check_roots(data_roots: tuple[Path, ...]) -> None:
    """Raise ValueError for a data root that is not there. In a cluster it may be on the nodes alone."""
    for root in data_roots:
        if not root.is_dir():
            raise ValueError(f"--data-root {root} is no folder on this machine. Make it, or name one that jobs may read.")


def run(
    settings: Settings, database: Database, launcher: Launcher, listeners: list[socket.socket], former_pid: int | None = None
) -> None:
    """Serve in a thread, and wait for a signal in this one, which stops the two parts one after the other.

    former_pid: the process that served this data folder before. It has ended.
    """
    dispatcher = Dispatcher(database, launcher, settings)
    if former_pid is not None:
        dispatcher.succeed(former_pid)
    app = create_app(settings, database=database, wake=dispatcher.wake, loops=dispatcher.health, planning=dispatcher.planning)
    server = http_server(app, settings)

    def serve_until_told() -> None:
        try:
            server.run(sockets=listeners)
        except BaseException:
            logger.exception("the HTTP server failed; the process ends")
            raise
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # a server that ends by itself ends the wait below too

    thread = threading.Thread(target=serve_until_told, name="octet-http")
    freeze_what_is_there()
    dispatcher.start()
    thread.start()
    try:
        logger.info("Octet listens on %s://%s:%d, data in %s", settings.scheme, settings.host, settings.port, settings.data_dir)
        received = signal.sigwait(_STOP_SIGNALS)
        logger.info("stopping on %s", signal.Signals(received).name)
        _let_jobs_save(dispatcher)
    finally:
        server.should_exit = True
        thread.join()
        dispatcher.stop()


def _let_jobs_save(dispatcher: Dispatcher) -> None:
    """Wait until every attempt has saved a checkpoint and ended, or for another signal. The API answers meanwhile.

    The loop `watch` ends those that take longer than `save_grace_s`.
    """
    try:
        num_live = dispatcher.drain()
        if not num_live:
            return
        logger.info(
            "%d job%s will go on when `octet serve` starts with this data folder again, after the checkpoint that is being "
            "saved now. Another signal stops at once; they then go on from the checkpoint before",
            num_live,
            "s" * (num_live > 1),
        )
        while dispatcher.drain():
            if signal.sigtimedwait(_STOP_SIGNALS, _LOOK_EVERY_S) is not None:
                logger.info("stopping at once")
                return
    except (NotLeading, SQLAlchemyError) as error:
        logger.warning("jobs save no checkpoint now, and go on from the one before: %s", error or "another dispatcher leads")


@contextmanager
def _local_cluster(settings: Settings) -> Iterator[Launcher]:
    """A launcher on the embedded Ray. Ray ends with the server; after a kill it runs on for a while, for the next server."""
    local = LocalRay(settings.data_dir, settings.pools, warm_idle_s=settings.warm_idle_s)
    launcher = HostedLauncher(local.ensure, settings.pools, warm_idle_s=settings.warm_idle_s)
    try:
        yield launcher
    finally:
        launcher.close()
        local.stop()
