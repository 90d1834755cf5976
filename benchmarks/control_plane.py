"""Time the control plane's HTTP API on SQLite: submissions, reads and `/healthz`, with an empty queue and a long one.

    python -m benchmarks.control_plane --tree . --tree ../before --rounds 3

Each tree (a checkout) gets a server of its own and they take turns, so that other load on the machine affects all of them.
SQLite is on the disk of `--folder` with synchronous=FULL. The client sends prepared bytes over keep-alive connections. CPU
is that of the whole server process, dispatcher included.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import control_plane_rows as rows
from benchmarks.control_plane_client import closed_loop
from benchmarks.control_plane_tables import compare, options_of

START_S = 60.0
SPEC = {
    "name": "benchmark",
    "model": {"family": "gpt", "preset": "gpt-tiny"},
    "precision": {"level": "O2"},
    "training": {"steps": 10, "global_batch_size": 4, "sequence_length": 32, "optimizer": {"learning_rate": 3e-4}},
    "labels": {"team": "research"},
}


class Connection:
    """One keep-alive connection that sends prepared requests."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes, status: int = 200) -> bytes:
        """Send a request and return the body of its answer. Raises RuntimeError for another status."""
        self._socket.sendall(request)
        received = b""
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += self._receive()
        head = received[:end].lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        while len(received) < end + 4 + length:
            received += self._receive()
        if int(head[9:12]) != status:
            raise RuntimeError(f"got {received[:2000].decode()}; expected status {status}")
        return received[end + 4 :]

    def _receive(self) -> bytes:
        chunk = self._socket.recv(1 << 16)
        if not chunk:
            raise RuntimeError("the server closed the connection")
        return chunk

    def close(self) -> None:
        self._socket.close()


def get(path: str) -> bytes:
    """Build a request."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


def submission(corpus: Path) -> bytes:
    """Build the request that submits the benchmark's job."""
    body = json.dumps({**SPEC, "data": {"source": "text", "path": str(corpus)}}).encode()
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@dataclass
class Server:
    """A server of one tree."""

    tree: Path
    folder: Path
    port: int
    process: "subprocess.Popen[bytes]"

    def cpu_s(self) -> float:
        """CPU seconds of the process so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.folder / "octet.db"

    def memory_mib(self) -> float:
        """Resident memory of the process, in MiB."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def running_apis(tree: Path, folder: Path, url: str, number: int) -> Iterator[list[Server]]:
    """Start so many processes of `octet api` on one PostgreSQL, and wait until they answer; end them afterwards."""
    servers: list[Server] = []
    with ExitStack() as stack:
        for _ in range(number):
            port = _free_port()
            command = [sys.executable, "-P", "-m", "octet.client.cli", "api"]
            settings = {"OCTET_DATABASE_URL": url, "OCTET_PORT": str(port), "OCTET_DATA_DIR": str(folder)}
            environment = os.environ | {"PYTHONPATH": str(tree.resolve())} | settings
            process = stack.enter_context(_process(command, environment, tree, folder))
            _wait_for_answer(port, "/healthz", process, folder)
            servers.append(Server(tree, folder, port, process))
        yield servers


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextmanager
def _process(command: list[str], environment: dict[str, str], tree: Path, folder: Path) -> "Iterator[subprocess.Popen[bytes]]":
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, cwd=tree, stderr=log, stdout=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _wait_for_answer(port: int, path: str, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            connection = Connection(port)
            connection.ask(get(path))
            connection.close()
            return
        except (OSError, RuntimeError):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"the server did not start: {(folder / 'server.log').read_text()}") from None
            time.sleep(0.1)


@contextmanager
def running(
    tree: Path, folder: Path, *, slots: int = 1, settings: dict[str, str] | None = None, reconciled: Path | None = None
) -> Iterator[Server]:
    """Start the server of a tree, with OCTET_* variables, and wait until it leads; end it afterwards.

    reconciled: a file that the server writes once it has asked its cluster about each live attempt of the database.
    """
    port = _free_port()
    script = Path(__file__).with_name("control_plane_server.py")
    command = [sys.executable, "-P", str(script), "--port", str(port), "--data-dir", str(folder), "--slots", str(slots)]
    command += ["--reconciled", str(reconciled)] if reconciled else []
    environment = os.environ | {"PYTHONPATH": str(tree.resolve())} | (settings or {})
    with _process(command, environment, tree, folder) as process:
        _wait_for_answer(port, "/readyz", process, folder)
        yield Server(tree, folder, port, process)


def latencies_ms(server: Server, request: bytes, num_requests: int) -> tuple[list[float], float]:
    """Send a request again and again over one connection; return the milliseconds of each answer, and the server's CPU ms."""
    cpu_s = server.cpu_s()
    connection, times_ms = Connection(server.port), []
    for _ in range(num_requests):
        started_at = time.perf_counter()
        connection.ask(request)
        times_ms.append((time.perf_counter() - started_at) * 1000)
    connection.close()
    return times_ms, (server.cpu_s() - cpu_s) / num_requests * 1000


def restart(tree: Path, folder: Path, num_running: int) -> dict[str, float]:
    """Start a server on a database with running jobs; measure how long it takes until it has asked about each of them."""
    rows.add_running(folder / "octet.db", num_running)
    reconciled, began = folder / "reconciled", time.monotonic()
    with running(tree, folder, slots=num_running, reconciled=reconciled) as server:
        while not reconciled.exists():
            if time.monotonic() > began + START_S:
                raise RuntimeError(f"the server has not reconciled its jobs: {(folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.01)
        name = f"restart to reconciled, {num_running} running jobs"
        return {f"{name} (s)": time.monotonic() - began, f"{name} (CPU s)": server.cpu_s()}


def measure(server: Server, corpus: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure one server once. The keys name figure and unit."""
    request = submission(corpus)
    figures = {"memory, idle, without Ray (MiB)": server.memory_mib()}
    connection = Connection(server.port)
    ids = [json.loads(connection.ask(request, status=201))["id"] for _ in range(60)]
    connection.close()

    def latency(name: str, path: str, num_requests: int = options.requests) -> None:
        times_ms, cpu_ms = latencies_ms(server, get(path), num_requests)
        figures[f"{name}, p50 (ms)"] = statistics.median(times_ms)
        figures[f"{name}, p99 (ms)"] = statistics.quantiles(times_ms, n=100)[98]
        figures[f"{name}: CPU of each (ms)"] = cpu_ms

    def submit(name: str, num_connections: int) -> None:
        cpu_s = server.cpu_s()
        load = closed_loop([server.port], lambda _: request, num_connections, options.seconds, status=201)
        figures[f"submissions, {name} (1/s)"] = load.per_s
        figures[f"submissions, {name}: CPU of each (ms)"] = (server.cpu_s() - cpu_s) / len(load.latencies_ms) * 1000

    latency("/healthz", "/healthz")
    latency("one job", f"/v1/jobs/{ids[-1]}")
    latency("page of 50", "/v1/jobs?limit=50")
    submit("1 connection", 1)
    submit(f"{options.connections} connections", options.connections)
    if options.history:
        rows.add_history(server.database, options.history)
        name = f"{options.history} jobs"
        latency(f"page of 50, {name}", "/v1/jobs?limit=50")
        latency(f"one job, {name}", f"/v1/jobs/{ids[-1]}")
        latency(f"/metrics, {name}", "/metrics", max(10, options.requests // 10))
    if options.queued:
        rows.lengthen_queue(server.database, options.queued)
        name = f"{options.queued} queued"
        submit(f"{options.connections} connections, {name}", options.connections)
        latency(f"last job, {name}", f"/v1/jobs/{ids[-1]}")
        latency(f"page of 50, {name}", "/v1/jobs?limit=50")
        latency(f"/metrics, {name}", "/metrics", max(10, options.requests // 10))
    return figures


def main() -> int:
    """Print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--seconds", type=float, default=5, help="duration of each measurement of submissions")
    parser.add_argument("--requests", type=int, default=300, help="requests of each measurement of latency")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--queued", type=int, default=100_000, help="jobs of the long queue; 0 leaves it out")
    parser.add_argument("--history", type=int, default=1_000_000, help="jobs that ended before; 0 leaves them out")
    parser.add_argument("--running", type=int, default=1000, help="running jobs that a restarted server finds; 0 leaves it out")
    options = parser.parse_args()

    def once(tree: Path, folder: Path, corpus: Path) -> dict[str, float]:
        with running(tree, folder) as server:
            figures = measure(server, corpus, options)
        return figures | (restart(tree, folder, options.running) if options.running else {})

    return compare(options, "benchmarks.control_plane", "The control plane's HTTP API", once)


if __name__ == "__main__":
    raise SystemExit(main())
