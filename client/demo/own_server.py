"""A server for as long as the demo lasts: `octet serve` in a process group of its own, stopped with all that it started.

Ray by design outlives a server that is killed, so it is stopped too.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from rich.text import Text

from octet.client.api import Client
from octet.client.errors import ServerFailed
from octet.client.terminal import Terminal
from octet.client.text import duration

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
EXAMPLES = Path("/usr/share/doc")
_LOG_LINES_SHOWN = 20


class OwnServer:
    """A server process: its address and its life. Its log is `server.log` in its data folder."""

    def __init__(self, command: list[str], url: str, data_dir: Path) -> None:
        self.url = url
        self.log_path = data_dir / "server.log"
        self._data_dir = data_dir
        with open(self.log_path, "wb", opener=_private) as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us alone, and one signal reaches all that it starts
                env={name: value for name, value in os.environ.items() if not name.startswith("OCTET_")},
            )

    def check(self) -> None:
        """Raise ServerFailed if the process has ended."""
        status = self._process.poll()
        if status is not None:
            raise ServerFailed(f"the server ended with exit status {status}. {self._log_end()}")

    def wait_until_ready(self, terminal: Terminal, timeout_s: float = START_TIMEOUT_S) -> None:
        started = time.monotonic()
        with Client(self.url) as client, terminal.spinner("waiting for the server to be ready"):
            while not client.is_ready():
                self.check()
                if time.monotonic() - started > timeout_s:
                    raise ServerFailed(f"the server was not ready after {timeout_s:g} s. {self._log_end()}")
                time.sleep(0.1)
        terminal.show(Text(f"The server is ready after {duration(time.monotonic() - started)}."))

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ask the server to end, wait, then kill what is left of its process group, and end its Ray if it could not."""
        from octet.service.cluster.ray.embedded import LocalRay

        try:
            self._process.terminate()
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            LocalRay(self._data_dir, ()).stop()

    def _log_end(self) -> str:
        lines = self.log_path.read_text("utf-8", "replace").splitlines()[-_LOG_LINES_SHOWN:]
        return "\n".join([f"The end of its log, {self.log_path}:", *(f"  {line}" for line in lines)])


@contextlib.contextmanager
def own_server(data_dir: Path, data_root: str, terminal: Terminal) -> Iterator[OwnServer]:
    """Start `octet serve` on a free port and wait until it is ready; stop it at the end of the block, however that ends."""
    with _held_port() as port:
        command = [sys.executable, "-P", "-m", "octet.client.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--data-dir", str(data_dir)]
        # The page's form begins with the README's job, which reads EXAMPLES.
        for root in (Path(data_root), EXAMPLES):
            command += ["--data-root", str(root)] if root.exists() else []
        url = f"http://127.0.0.1:{port}"
        terminal.show(Text(f"Starting octet serve on {url}; its data and server.log are in {data_dir}."))
        server = OwnServer(command, url, data_dir)
        try:
            server.wait_until_ready(terminal)
            yield server
        finally:
            with handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a second Ctrl-C leaves nothing behind
                terminal.show(Text("Stopping the server."))
                server.stop()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def _held_port() -> Iterator[int]:
    """A free port. The bound socket keeps others away from it; the server sets SO_REUSEADDR too, and can listen there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def handled(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Call `handler` for these signals inside the block; restore the former handlers after it."""
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in former.items():
            signal.signal(number, handler_before)


def leave(number: int, frame: FrameType | None) -> None:
    """Unwind the stack as Ctrl-C does, so that what was started is stopped."""
    raise SystemExit(128 + number)
