"""Cluster mode on one machine, on loopback: PostgreSQL, `octet api`, two `octet dispatcher`s, a Ray head and two nodes.

Each part stands for a container: its processes end together, and it is started again. Commits reach the disk, because a
database that is killed may lose nothing.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from octet.api_schemas import Job, PoolConfig
from octet.client import Client
from octet.service.cluster.ray.embedded import ray_environment
from tests.chaos.faults import component_of
from tests.e2e.ray_nodes import LOOPBACK, RAYLET, Node
from tests.kit.ports import free_port
from tests.kit.waiting import LONG_S, wait_until
from tests.service.postgres_server import PostgresServer

API_KEY = "a-key-for-a-storm-0123456789"
POOL = PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=2, preempts=True)
PARTS = ("postgres", "head", "node-1", "node-2", "api", "dispatcher-1", "dispatcher-2")
_POLL_S = 0.2
_AT_THE_END_S = 60.0


def write_pools(path: Path) -> Path:
    """Write the pools of a storm, and return their file."""
    path.write_text(json.dumps([POOL.model_dump(mode="json")]))
    return path


Spawn = Callable[[], "subprocess.Popen[bytes] | Node"]


@dataclass
class Part:
    """One part, and its process or Ray node while it runs."""

    name: str
    spawn: Spawn
    running: "subprocess.Popen[bytes] | Node | None" = None

    @property
    def is_running(self) -> bool:
        """True until the part's first process has ended."""
        return self.running is not None and self.running.poll() is None

    def start(self) -> None:
        assert not self.is_running, self.name
        self.kill()
        self.running = self.spawn()

    def kill(self) -> None:
        """SIGKILL what is left of the part, as a container's end does. A dispatcher's Ray node has to end by itself."""
        if isinstance(self.running, Node):
            self.running.kill()
        elif self.running is not None:
            self.running.kill()
            self.running.wait()

    def processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """Yield the part's processes, each with its component; the first process has the part's own name."""
        if isinstance(self.running, Node):
            for process in self.running.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    yield component_of(process), process
            return
        kind = self.name.partition("-")[0]
        with contextlib.suppress(psutil.NoSuchProcess):
            assert self.running is not None
            first = psutil.Process(self.running.pid)
            yield kind, first
            for child in first.children(recursive=True):
                yield {"postgres": "backend", "dispatcher": "dispatcher's Ray"}.get(kind, kind), child


class Cluster:
    """All parts. A storm may kill and start each; `start` starts them together and `stop` ends all but the database."""

    def __init__(self, folder: Path, ray_folder: Path, postgres: PostgresServer, variables: dict[str, str]) -> None:
        self._folder, self._ray_folder, self._postgres = folder, ray_folder, postgres
        self.data_dir = folder / "octet"
        token = self.data_dir / "ray" / "token"
        token.parent.mkdir(parents=True, mode=0o700)
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        (folder / "key").write_text(API_KEY)
        write_pools(folder / "pools.json")
        self.database_url = postgres.url
        port, self._head_port = free_port(), free_port()
        self.client = Client(f"http://127.0.0.1:{port}", API_KEY, patience_s=LONG_S)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OCTET_", "RAY_"))}
        self._ray_environment = inherited | ray_environment(token) | LOOPBACK | RAYLET
        self._environment = (
            inherited
            | ray_environment(token)
            | LOOPBACK
            | variables
            | {
                "OCTET_HOST": "127.0.0.1",
                "OCTET_PORT": str(port),
                "OCTET_API_KEYS_FILE": str(folder / "key"),
                "OCTET_DATA_DIR": str(self.data_dir),
                "OCTET_DATA_ROOTS": str(folder),
                "OCTET_DATABASE_URL": postgres.url,
                "OCTET_POOLS_FILE": str(folder / "pools.json"),
                "OCTET_REPORT_URL": f"http://127.0.0.1:{port}",
                "OCTET_RAY_ADDRESS": f"127.0.0.1:{self._head_port}",
            }
        )
        self.parts = {name: Part(name, self._spawner(name)) for name in PARTS}

    def start(self) -> None:
        """Start everything, and wait until it takes jobs and has its slots."""
        ready = {"postgres": lambda: self._postgres.is_ready, "head": self._head_answers}
        for part in self.parts.values():
            part.start()
            self.wait_for(ready.get(part.name, lambda: True))
        for part in self.parts.values():
            while (
                isinstance(part.running, Node) and not part.running.joins()
            ):  # it gives up where an answer takes half a minute
                part.start()
        self.wait_for(self.client.is_ready)

    def _head_answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self._head_port), timeout=2).close()
            return True
        return False

    def stop(self) -> None:
        """End the service as an operator does, and then Ray. The database stays."""
        self.client.close()
        for name in ("dispatcher-1", "dispatcher-2", "api"):
            running = self.parts[name].running
            assert isinstance(running, subprocess.Popen)
            running.send_signal(signal.SIGTERM)
            running.wait(LONG_S)
        for name in ("node-1", "node-2", "head"):
            self.parts[name].kill()

    def kill(self) -> None:
        """Kill every part, suspended or not, and what they left."""
        for name in ("dispatcher-1", "dispatcher-2", "api", "head", "node-1", "node-2"):
            self.parts[name].kill()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def kill_the_database(self) -> None:
        """Kill PostgreSQL with its backends, suspended or not."""
        postgres = self.parts["postgres"]
        for _, process in [*postgres.processes()] if postgres.running else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        postgres.kill()

    def processes(self) -> list[psutil.Process]:
        """All processes of this service and its Ray, PostgreSQL left out, whichever part they belong to or belonged to."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                token = process.environ().get("RAY_AUTH_TOKEN_PATH", "")
                if token.startswith(f"{self.data_dir}/") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def processes_left(self) -> list[psutil.Process]:
        """Those of `processes` that are there although all parts have ended a while ago."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.processes(), timeout_s=_AT_THE_END_S, poll_s=1)
        return self.processes()

    def wait_for(self, condition: Callable[[], object]) -> None:
        wait_until(condition, poll_s=_POLL_S)

    def finish(self, job_id: str) -> Job:
        self.wait_for(lambda: self.client.job(job_id).state.is_terminal)
        return self.client.job(job_id)

    def _spawner(self, name: str) -> Spawn:
        kind = name.partition("-")[0]
        if kind == "postgres":
            return self._postgres.spawn
        if kind == "head":
            return self._head
        if kind == "node":
            key, value = POOL.node_label
            resources = json.dumps({POOL.slot_resource: 1})
            head = f"--address=127.0.0.1:{self._head_port}"
            place = (head, f"--resources={resources}", f"--labels={key}={value}")
            return lambda: Node("tests.e2e.join_on_loopback", [*place], self._ray_environment, self._folder / f"{name}.log")
        command = {"api": ("octet.client.cli", "api"), "dispatcher": ("tests.chaos.dispatch_on_loopback",)}[kind]
        return lambda: self._process(name, *command)

    def _head(self) -> Node:
        """Start a head in a folder of its own, as in a container that is made again. Paths of sockets have to be short."""
        temp_dir = tempfile.mkdtemp(dir=self._ray_folder)
        arguments = [
            "--head",
            f"--port={self._head_port}",
            "--include-dashboard=false",
            "--no-monitor",
            f"--temp-dir={temp_dir}",
        ]
        return Node("ray.scripts.scripts", arguments, self._ray_environment, self._folder / "head.log")

    def _process(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )


@contextmanager
def cluster_in(folder: Path, variables: dict[str, str]) -> Iterator[Cluster]:
    """Prepare a cluster whose jobs and logs lie below `folder`, and leave no process of it. Raises Unavailable."""
    with tempfile.TemporaryDirectory(prefix="oc-", ignore_cleanup_errors=True) as ray_folder:
        postgres_folder = Path(tempfile.mkdtemp(prefix="octet-pg-"))
        cluster = Cluster(folder, Path(ray_folder), PostgresServer(postgres_folder, is_durable=True), variables)
        try:
            yield cluster
        finally:
            cluster.kill()
            cluster.kill_the_database()
            shutil.rmtree(postgres_folder, ignore_errors=True)
