"""The template process: it imports torch and the trainer once, then forks one process for each rank.

    python -P -m octet.worker.rank.warm.template --name NAME --owner PID --idle-s S  (started by `octet.worker.rank.warm.start`)

It computes nothing and has one thread, so a fork of it is complete. It listens on an abstract Unix socket, answers only its
own user, and ends with its owner (Ray's raylet), or when nobody has connected for a while. A forked process ends with
the connection of its actor.
"""

import argparse
import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from octet.worker.rank.warm import messages

LIFE_S = 6 * 3600.0
"""A template this old takes no more requests, and the next rank starts another."""

_IMPORTED = ("octet.worker.rank.warm.order", "octet.worker.train.loop")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forked:
    """A forked process. `connection` is a duplicate of its connection to its actor."""

    pid: int
    pid_descriptor: int
    connection: socket.socket


class Template:
    """Forks on request, ends what nobody waits for, and reports how a forked process ended."""

    def __init__(self, listener: socket.socket, owner_descriptor: int, idle_s: float) -> None:
        self._listener = listener
        self._owner_descriptor = owner_descriptor
        self._idle_s = idle_s
        self._forked: dict[int, Forked] = {}  # by both of its descriptors
        self._ends_at = time.monotonic() + LIFE_S
        self._used_at = time.monotonic()
        self._poller = select.epoll()
        self._poller.register(listener, select.EPOLLIN)
        self._poller.register(owner_descriptor, select.EPOLLIN)

    def serve(self) -> None:
        """Serve until the owner ends, or until this template is old or idle and its processes have ended."""
        is_open = True
        while is_open or self._forked:
            ready = {descriptor for descriptor, _ in self._poller.poll(1.0)}
            if self._owner_descriptor in ready:
                self._end_all()
                return
            for descriptor in ready:
                if forked := self._forked.get(descriptor):
                    self._follow(forked, descriptor)
            if is_open and self._listener.fileno() in ready:
                self._fork()  # last: it may open descriptors with the numbers of those that were just closed
            now = time.monotonic()
            is_idle = not self._forked and now > self._used_at + self._idle_s
            if is_open and (is_idle or now > self._ends_at):
                self._poller.unregister(self._listener)
                self._listener.close()
                is_open = False

    def _fork(self) -> None:
        connection, _ = self._listener.accept()
        if messages.peer_of(connection)[1] != os.geteuid():
            connection.close()
            return
        self._used_at = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._be_forked(connection)
        forked = Forked(pid, os.pidfd_open(pid), connection)
        self._forked[forked.pid_descriptor] = self._forked[connection.fileno()] = forked
        self._poller.register(forked.pid_descriptor, select.EPOLLIN)
        self._poller.register(connection, select.EPOLLRDHUP)

    def _be_forked(self, connection: socket.socket) -> None:
        """Run a rank in the process that was just forked, and end. Descriptors of other processes are closed first."""
        try:
            self._poller.close()
            self._listener.close()
            os.close(self._owner_descriptor)
            for other in set(self._forked.values()):
                os.close(other.pid_descriptor)
                other.connection.close()
            run_forked(connection)
        except BaseException:  # noqa: BLE001  (nothing of the template may run on in this process)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _follow(self, forked: Forked, descriptor: int) -> None:
        """Report how a forked process ended; end it if its actor is gone."""
        if descriptor != forked.pid_descriptor:
            os.kill(forked.pid, signal.SIGKILL)
            self._poller.unregister(forked.connection)
            return
        _, status = os.waitpid(forked.pid, 0)
        with contextlib.suppress(OSError):  # the actor may be gone too
            messages.send(forked.connection, {"exit_code": os.waitstatus_to_exitcode(status)})
        del self._forked[forked.pid_descriptor], self._forked[forked.connection.fileno()]
        os.close(forked.pid_descriptor)
        forked.connection.close()
        self._used_at = time.monotonic()

    def _end_all(self) -> None:
        for forked in set(self._forked.values()):
            os.kill(forked.pid, signal.SIGKILL)


def run_forked(connection: socket.socket) -> None:
    """Greet the actor, receive what to run, run it in the actor's folder and environment, and answer."""
    messages.send(connection, {"pid": os.getpid()})
    received = messages.receive(connection, num_descriptors=2)
    if received is None:
        return  # the actor has stopped waiting
    request, outputs = received
    for output, number in zip(outputs, (1, 2), strict=True):
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["working_dir"])
    os.umask(request["umask"])
    threading.Thread(target=_end_with, args=(connection,), name="octet-end", daemon=True).start()
    messages.send(connection, _answer(request))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    order = importlib.import_module("octet.worker.rank.warm.order")
    try:
        placed_at = datetime.fromisoformat(request["placed_at"])
        return {"ending": order.run_order(request["order"], request["rank_env"], placed_at, is_forked=True)}
    except BaseException:  # noqa: BLE001  (the actor raises it)
        return {"error": traceback.format_exc()}


def _end_with(connection: socket.socket) -> None:
    """End this process when the connection ends. The template does so too; this is for a template that is gone."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m octet.worker.rank.warm.template")
    parser.add_argument("--name", required=True)
    parser.add_argument("--owner", type=int, required=True)
    parser.add_argument("--idle-s", type=float, required=True)
    options = parser.parse_args()
    if os.fork():  # so that Ray does not count us among the children of its worker, which end with it
        os._exit(0)
    os.setpgid(0, 0)
    try:
        owner_descriptor = os.pidfd_open(options.owner)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{options.name}")
    except (ProcessLookupError, OSError):
        return  # the owner has ended, or another template was faster
    listener.listen(64)
    for name in _IMPORTED:
        importlib.import_module(name)
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        logger.warning("no warm starts: the template has %d threads; a fork needs exactly 1", num_threads)
        return
    gc.collect()
    gc.freeze()  # the forked processes then share these pages: their collector does not touch them
    Template(listener, owner_descriptor, options.idle_s).serve()


if __name__ == "__main__":
    main()
