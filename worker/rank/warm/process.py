"""Finds or starts the node's template, and takes a forked process from it. Whatever goes wrong, the caller starts cold.

The template's name holds a hash of everything that a rank inherits: the owner, the user, the interpreter, its search path
and the environment. So a difference in any of them means another template. Only Linux has what this needs.
"""

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from octet.worker.rank.warm import messages

_START_S = 20.0
_LONGEST_WAIT_S = 60.0
_STUCK_S = 3.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Set for each rank by Ray or by `_ONE_THREAD`. A forked process gets the values of its actor.
_OF_EACH_RANK = {"CUDA_VISIBLE_DEVICES", *_ONE_THREAD}

Ending = tuple[str | None, str | None, str]
"""Outcome, reason and message of a rank that has ended; see `octet.worker.rank.warm.order`."""

logger = logging.getLogger(__name__)


class ProcessLost(Exception):
    """A warm process died before it reported how its rank ended."""


class WarmProcess:
    """A process with torch imported that waits for its rank. It ends with this object's process."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self.pid = pid

    def run(self, order_json: str, rank_env: dict[str, Any], placed_at: datetime) -> Ending:
        """Run one rank with the environment, folder and outputs of this process, and wait for its end.

        Raises ProcessLost if it dies, RuntimeError with its traceback if the rank raised.
        """
        umask = os.umask(0o077)
        os.umask(umask)
        request = {
            "environment": _without_secrets(os.environ),
            "working_dir": str(Path.cwd()),
            "umask": umask,
            "order": order_json,
            "rank_env": rank_env,
            "placed_at": placed_at.isoformat(),
        }
        with self._connection:
            try:
                messages.send(self._connection, request, (1, 2))
            except OSError as error:
                raise ProcessLost(f"it ended before it was given its rank: {error}") from error
            received = messages.receive(self._connection)
        answer = received[0] if received is not None else {}
        if "error" in answer:
            raise RuntimeError(f"the rank raised\n{answer['error']}")
        if "ending" not in answer:
            raise ProcessLost(_describe(answer.get("exit_code")))
        outcome, reason, message = answer["ending"]
        return outcome, reason, message

    def end(self) -> None:
        """End the process. `run`, if it waits in another thread, raises ProcessLost."""
        with contextlib.suppress(OSError):  # it has ended already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process, which was given no rank."""
        self._connection.close()


def take(idle_s: float, owner: int | None = None) -> WarmProcess | None:
    """Take a process from this node's template, which is started if there is none. None: there is none to be had.

    idle_s: how long a new template waits for requests before it ends; 0 means that there are no templates. owner: the
    process that a template ends with; by default our parent, which is Ray's raylet for an actor.
    """
    try:
        connection = start(idle_s, owner)
        return _process_of(connection) if connection is not None else None
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("no warm process, so the rank starts cold: %s: %s", type(error).__name__, error)
        return None


def start(idle_s: float, owner: int | None = None) -> socket.socket | None:
    """Connect to this node's template; start it if there is none. It forks once it has imported torch. Raises OSError."""
    owner = os.getppid() if owner is None else owner
    if idle_s <= 0 or sys.platform != "linux" or owner == 1:
        return None
    name = _name(owner)
    if (connection := _connect(name)) is not None:
        return connection
    command = [sys.executable, "-P", "-m", "octet.worker.rank.warm.template", "--name", name, "--owner", str(owner)]
    environment = _without_secrets(os.environ) | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([*command, "--idle-s", str(idle_s)], env=environment, stdin=subprocess.DEVNULL, timeout=_START_S, check=True)
    deadline = time.monotonic() + _START_S
    while (connection := _connect(name)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return connection


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out the token of the whole cluster, which opens every node: a rank runs a user's code and never asks Ray."""
    return {name: value for name, value in environment.items() if name != "RAY_AUTH_TOKEN"}


def _name(owner: int) -> str:
    environment = {name: value for name, value in os.environ.items() if not _is_of_each_rank(name)}
    user = (os.getuid(), os.geteuid(), os.getgid(), os.getegid(), os.getgroups())
    inherited = (owner, _stat(owner)[19], user, sys.executable, sys.path, sorted(environment.items()))
    return f"octet-warm-{hashlib.sha256(json.dumps(inherited).encode()).hexdigest()[:40]}"


def _is_of_each_rank(name: str) -> bool:
    return name in _OF_EACH_RANK or name.startswith("RAY_")


def _connect(name: str) -> socket.socket | None:
    """Connect to the template of this name; None if there is none, or if it is another user's."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_STUCK_S)
    try:
        connection.connect(f"\0{name}")
    except ConnectionRefusedError:
        connection.close()
        return None
    if messages.peer_of(connection)[1] != os.geteuid():
        connection.close()
        raise PermissionError(f"the socket of the template {name} belongs to another user")
    return connection


def _process_of(connection: socket.socket) -> WarmProcess | None:
    """Wait for the forked process's greeting. A template that stands still is killed."""
    template, _ = messages.peer_of(connection)
    began, cpu = time.monotonic(), _cpu_ticks(template)
    while time.monotonic() < began + _LONGEST_WAIT_S:
        try:
            received = messages.receive(connection)
        except TimeoutError:
            if (now := _cpu_ticks(template)) > cpu:
                cpu = now  # it imports
                continue
            break
        if received is None:
            connection.close()
            logger.warning("no warm process, so the rank starts cold: the template ended")
            return None
        connection.settimeout(None)
        return WarmProcess(connection, int(received[0]["pid"]))
    connection.close()
    logger.warning("no warm process, so the rank starts cold: template %d is stuck and is killed", template)
    os.kill(template, signal.SIGKILL)
    return None


def _cpu_ticks(pid: int) -> int:
    """The CPU time that a process has used."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on, which is field 3 in its manual. Raises OSError without such a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _describe(exit_code: int | None) -> str:
    if exit_code is None:
        return "its process died"
    return f"its process died of {signal.Signals(-exit_code).name}" if exit_code < 0 else f"its process ended with {exit_code}"
