"""A Ray cluster of several nodes on this machine, each with a raylet of its own, and Octet on it.

The head has no slots. A node that dies takes all its processes with it, as a machine does that loses its power.
"""

import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import psutil
from prometheus_client.parser import text_string_to_metric_families

from octet.api_schemas import PoolConfig
from octet.service.cluster.ray.embedded import ray_environment
from tests.e2e.octet_server import Server
from tests.kit.waiting import LONG_S

Found = TypeVar("Found")
POOL = PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=4)
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # see service/cluster/ray/embedded.py
# A raylet ends itself if its agents have not started within 30 s; on two cores full of ranks they need longer.
RAYLET = {"RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0", "RAY_agent_register_timeout_ms": "300000"}
_FEW_PROCESSES = ("--disable-usage-stats", "--include-log-monitor=false", "--num-cpus=0", "--object-store-memory=100000000")
_POLL_S = 0.1
_FAST_POLL_S, _STANDSTILL_S = 0.0005, 0.5
_MOST_STARTS = 10
# The kernel gives these to nobody who asks for any port.
_AGENTS_PORTS = range(15_000, 32_000)
_AGENTS = ("--dashboard-agent-grpc-port", "--dashboard-agent-listen-port", "--runtime-env-agent-port", "--metrics-export-port")
ANY_PORTS = ("--min-worker-port=0", "--max-worker-port=0", "--node-ip-address=127.0.0.1")


def _ports_of_agents() -> list[str]:
    """Choose the ports of a node's agents: a raylet that has to ask them for theirs waits 15 s, and then ends itself.

    Ray's own port for one of them is the same on all nodes, which here are on one machine.
    """
    chosen: list[int] = []
    for port in random.SystemRandom().sample(_AGENTS_PORTS, len(_AGENTS_PORTS)):
        with socket.socket() as attempt, contextlib.suppress(OSError):
            attempt.bind(("127.0.0.1", port))
            chosen.append(port)
        if len(chosen) == len(_AGENTS):
            break
    return [f"{option}={port}" for option, port in zip(_AGENTS, chosen, strict=True)]


class Node:
    """One `ray start`: a raylet, its agents and the ranks on it."""

    def __init__(self, module: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        options = [*_FEW_PROCESSES, *ANY_PORTS, *_ports_of_agents(), *arguments]
        command = [sys.executable, "-m", module, "start", "--block", *options]
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def joins(self) -> bool:
        """Wait until the node has joined the cluster, or has given up, as Ray does where an answer takes half a minute."""
        while self._process.poll() is None:
            if b"Ray runtime started" in self._log.read_bytes():
                return True
            time.sleep(_POLL_S)
        return False

    def poll(self) -> int | None:
        """Return the status of `ray start`, which ends with its raylet; None while it runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        """The process of `ray start`."""
        return self._process.pid

    @property
    def raylet(self) -> psutil.Process | None:
        """The raylet; None until it runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                if process.name() == "raylet":
                    return process
        return None

    def processes(self) -> list[psutil.Process]:
        """All that would end with the machine: what `ray start` started, and the template of ranks with its forks."""
        raylet = self.raylet
        roots = [psutil.Process(self._process.pid)] if self._process.poll() is None else []
        if raylet is not None:
            owner = ["--owner", str(raylet.pid)]
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    command = process.cmdline()
                    if "octet.worker.rank.warm.template" in command and owner[1] in command and owner[0] in command:
                        roots.append(process)
        found = {}
        for root in roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {process.pid: process for process in (root, *root.children(recursive=True))}
        return list(found.values())

    def kill(self) -> None:
        """SIGKILL everything: the raylet first, as if all ended at once."""
        raylet, processes = self.raylet, self.processes()
        processes.sort(key=lambda process: raylet is None or process.pid != raylet.pid)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(processes)

    def kill_when(self, find: Callable[[], Found | None]) -> Found:
        """Kill at a moment when `find` finds something that is still there after the node has stood still for a while.

        All of the node's processes have to run already. Returns what was found.
        """
        processes, until = self.processes(), time.monotonic() + LONG_S
        while True:
            while (found := find()) is None:
                assert time.monotonic() < until, "there was no moment to kill the node at"
                time.sleep(_FAST_POLL_S)
            for process in processes:
                process.suspend()
            time.sleep(_STANDSTILL_S)  # other nodes may finish what does not need this one
            if find() == found:
                self.kill()
                return found
            for process in processes:
                process.resume()


class Nodes:
    """A head without slots, which runs once this is made, and nodes of the pool."""

    def __init__(self, data_dir: Path, stack: ExitStack) -> None:
        token = data_dir / "ray" / "token"
        token.parent.mkdir(parents=True, mode=0o700)
        data_dir.chmod(0o700)
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self._logs, self._stack, self._num_nodes = data_dir.with_name("logs"), stack, 0
        self._logs.mkdir()
        # The path of a socket has 107 characters at most, so the folder's name is short.
        self._temp_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oc-", ignore_cleanup_errors=True)))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OCTET_", "RAY_"))}
        self._environment = inherited | ray_environment(token) | LOOPBACK | RAYLET
        head = ["--head", "--port=0", "--include-dashboard=false", "--no-monitor", f"--temp-dir={self._temp_dir}/ray"]
        self._start("ray.scripts.scripts", head)
        self.address = (self._temp_dir / "ray" / "ray_current_cluster").read_text().strip()

    def add(self, slots: int = 2) -> Node:
        """Start another node of the pool and wait until it has joined."""
        key, value = POOL.node_label
        resources = json.dumps({POOL.slot_resource: slots})
        arguments = [f"--address={self.address}", f"--resources={resources}", f"--labels={key}={value}"]
        return self._start("tests.e2e.join_on_loopback", arguments)

    def _start(self, module: str, arguments: list[str]) -> Node:
        """Start a node and wait until it runs. One that gives up, as on a busy machine, is started again."""
        for _ in range(_MOST_STARTS):
            self._num_nodes += 1
            node = Node(module, arguments, self._environment, self._logs / f"node-{self._num_nodes}.log")
            self._stack.callback(node.kill)
            if node.joins():
                return node
        said = [self._logs / f"node-{self._num_nodes}.log", *self._temp_dir.glob("ray/session_*/logs/raylet.*")]
        newest = sorted((path for path in said if path.exists()), key=lambda path: path.stat().st_mtime)[-4:]
        ends = "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in newest)
        raise RuntimeError(f"a node did not join in {_MOST_STARTS} starts; the last one said:\n{ends}")


class ServerOnNodes(Server):
    """`octet serve` on the nodes."""

    def __init__(self, data_dir: Path, nodes: Nodes) -> None:
        super().__init__(data_dir, variables={"OCTET_ELASTIC_GROW_AFTER_S": "1", "OCTET_LEASE_S": "60"})
        self._nodes, self._pools_file = nodes, data_dir.with_name("pools.json")
        self._pools_file.write_text(json.dumps({"pools": [POOL.model_dump(mode="json")]}))

    def command(self) -> list[str]:
        arguments = [self._nodes.address, str(self.port), str(self.data_dir), str(self._pools_file)]
        return [sys.executable, "-m", "tests.e2e.serve_on_nodes", *arguments]

    def wait_for_slots(self, number: int) -> None:
        """Wait until nodes with so many slots have joined the pool."""
        self.wait_for(lambda: self._slots_present() == number)

    def _slots_present(self) -> float:
        with urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            families = text_string_to_metric_families(answer.read().decode())
        wanted = {"pool": POOL.name, "kind": "present"}
        (number,) = (
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "octet_pool_slots" and sample.labels == wanted
        )
        return number


@contextmanager
def served_on_nodes(folder: Path) -> Iterator[tuple[Nodes, ServerOnNodes]]:
    """Octet on a cluster whose pool has no node yet. Nothing is left afterwards."""
    with ExitStack() as stack:
        nodes = Nodes(folder / "octet", stack)
        server = ServerOnNodes(folder / "octet", nodes)
        server.spawn()
        stack.callback(server.stop)
        server.wait_for(server.client.is_ready)
        yield nodes, server
