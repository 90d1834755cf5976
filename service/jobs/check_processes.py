"""Have files checked by the children of `check_server`: what a check takes of memory and time is not the API's.

The server starts with the API or with the first check; a child starts when no other is free. Whatever becomes of them, a
check is answered.
"""

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

from octet.api_schemas import Files, Violation
from octet.service.errors import InvalidRequest, NotReady
from octet.service.jobs.check_server import ANSWER, ASKED, GRACE_S, Answer, Asked, named
from octet.service.jobs.file_checks import Inputs

_COMMAND = (sys.executable, "-P", "-m", "octet.service.jobs.check_server")  # -P: a file in this folder is no module


class CheckProcesses:
    """The processes that check files for one API. Any thread asks; a check takes a child of its own as long as it lasts."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: list[_Child] = []

    def check(self, inputs: Inputs, files: Files) -> None:
        """Check as `check_files` does. Raises InvalidRequest also for files that take too much memory or time.

        Raises NotReady if the child was ended by somebody else.
        """
        try:
            child = self._idle.pop()
        except IndexError:
            child = self._start_child()
        try:
            answer = child.ask(Asked(inputs, files))
        except TimeoutError:
            child.close()
            allowed = f"files that can be checked within {files.timeout_s:g} s (data_check_timeout_s)"
            message = "The file system answered slowly, or the files are many or large. Try again, or make them smaller."
            raise InvalidRequest.of((Violation(field="data", got=named(inputs), allowed=allowed, message=message),)) from None
        except BaseException:
            child.close()
            raise
        if answer.is_last:
            child.close()
        else:
            self._idle.append(child)
        if answer.violation is not None:
            raise InvalidRequest.of((answer.violation,))
        if answer.fault is not None:
            raise RuntimeError(f"the check of files failed: {answer.fault}")

    def start(self) -> None:
        """Start the server, so that the first check need not wait until it has loaded the contracts."""
        with self._starting:
            self._connect()

    def close(self) -> None:
        """End all processes. Checks under way get NotReady."""
        with self._starting:
            for child in self._idle:
                child.close()
            self._idle.clear()
            self._end_server()

    def _start_child(self) -> "_Child":
        ours, theirs = socket.socketpair()
        with self._starting, theirs:
            try:
                self._send(theirs)
            except OSError:  # the server was ended by somebody else
                self._end_server()
                self._send(theirs)
        return _Child(ours)

    def _send(self, connection: socket.socket) -> None:
        socket.send_fds(self._connect(), [b"\n"], [connection.fileno()])

    def _connect(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                environment = {name: value for name, value in os.environ.items() if not name.startswith("OCTET_")}  # keys
                self._server = subprocess.Popen(_COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment)
        return self._control

    def _end_server(self) -> None:
        if self._control is not None and self._server is not None:
            self._control.close()
            self._control = None
            self._server.kill()
            self._server.wait()


class _Child:
    """A connection to one child."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")

    def ask(self, asked: Asked) -> Answer:
        """Return the answer. Raises TimeoutError, and NotReady if the child has ended."""
        timeout_s = asked.files.timeout_s
        self._connection.settimeout(None if timeout_s is None else timeout_s + GRACE_S)
        line = b""
        with suppress(ConnectionError):
            self._connection.sendall(ASKED.dump_json(asked) + b"\n")
            line = self._lines.readline()
        if not line:
            raise NotReady("the process that checked the job's files ended; try again")
        return ANSWER.validate_json(line)

    def close(self) -> None:
        self._lines.close()
        self._connection.close()
