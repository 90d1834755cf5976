"""The Ray node of a dispatcher. A Ray driver needs a node on its own machine, so the dispatcher joins the cluster with one.

The node has no resources and no labels, so nothing is ever placed on it.
"""

import logging
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from octet.service.cluster.ray.embedded import end_ray, start_dying_with_us

NODE_MANAGER_PORT = 6380  # fixed: a health check asks this port whether the node is up
_CONNECT_S = 2.0
_OBJECT_STORE_BYTES = 100_000_000

logger = logging.getLogger(__name__)


class RayNode:
    """A `ray start` in a child process. It is started on first use, started again if its raylet ends, and stopped with us."""

    def __init__(self, head_address: str) -> None:
        """`head_address` is host:port of the head's GCS. Raises ValueError for any other form."""
        self._host, _, port = head_address.rpartition(":")
        if not self._host or not port.isdecimal():
            raise ValueError(f"the Ray head's address is host:port, for example ray-head:6379; got {head_address!r}")
        self._port = int(port)
        self._process: subprocess.Popen[bytes] | None = None
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octet-node")
        """Its thread starts the process, and lives as long as this one: callers' threads end while the process has to go on."""

    def ensure(self) -> str:
        """Start our node if it does not run, and return the head's address. Raises ConnectionError if the head is away."""
        try:
            socket.create_connection((self._host, self._port), timeout=_CONNECT_S).close()
        except OSError as error:
            raise ConnectionError(f"the Ray head at {self._host}:{self._port} does not answer: {error}") from error
        self._starter.submit(self._start_if_it_does_not_run).result()
        return f"{self._host}:{self._port}"

    def stop(self) -> None:
        """Leave the cluster. After that `ensure` raises RuntimeError."""
        self._starter.shutdown()
        if self._process is not None:
            end_ray(self._process)
            self._process = None

    def _start_if_it_does_not_run(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            logger.warning("our Ray node ended with status %d; it is started again", self._process.returncode)
            end_ray(self._process)  # a raylet that is left has the port
            self._process = None
        if self._process is None:
            self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [
            *(
                sys.executable,
                "-m",
                "octet.service.cluster.ray.command",
                "start",
                f"--address={self._host}:{self._port}",
                "--block",
            ),
            *("--num-cpus=0", "--num-gpus=0", f"--node-manager-port={NODE_MANAGER_PORT}"),
            *("--disable-usage-stats", "--include-log-monitor=false", f"--object-store-memory={_OBJECT_STORE_BYTES}"),
        ]
        return start_dying_with_us(command)
