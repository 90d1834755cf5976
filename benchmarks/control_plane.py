"""Time what the control plane's HTTP API on SQLite answers: `/healthz`, one job, a page of jobs, with and without a history.

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
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.control_plane_tables import compare, options_of

START_S = 60.0
HISTORY_S = 30 * 24 * 3600
PREFIX = "001"
"""The ids of the jobs of a history begin so."""
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
def running(tree: Path, folder: Path, *, slots: int = 1, settings: dict[str, str] | None = None) -> Iterator[Server]:
    """Start the server of a tree, with OCTET_* variables, and wait until it leads; end it afterwards."""
    port = _free_port()
    script = Path(__file__).with_name("control_plane_server.py")
    command = [sys.executable, "-P", str(script), "--port", str(port), "--data-dir", str(folder), "--slots", str(slots)]
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


def add_history(file: Path, num_jobs: int) -> None:
    """Add jobs that ended one after the other in the last 30 days, each after one attempt.

    All are copies of a job that is queued. Their ids sort before those that the service makes.
    """
    at = f"strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+f seconds', {HISTORY_S} * (1.0 * i / {num_jobs} - 1))) || '000'"
    values = {
        "id": _id("job"),
        "current_attempt_id": _id("att"),
        "state": "CASE WHEN i % 100 < 90 THEN 'succeeded' WHEN i % 100 < 97 THEN 'failed' ELSE 'cancelled' END",
        "reason": "CASE WHEN i % 100 BETWEEN 90 AND 94 THEN 'worker_error' WHEN i % 100 IN (95, 96) THEN 'worker_lost' END",
        **{"num_attempts": "1", "step": "10", "steps": "10", "loss": "2.5", "tokens_per_s": "1000.0"},
        **dict.fromkeys(("created_at", "queued_at", "started_at", "reported_at", "finished_at"), at),
    }
    attempt = {
        **{"id": "current_attempt_id", "job_id": "id", "epoch": "1", "pool": "pool", "workers": "1", "num_log_lines": "0"},
        **{"state": "state", "reason": "reason"},
        **dict.fromkeys(("created_at", "finished_at", "released_at", "first_step_at"), "finished_at"),
    }
    with sqlite3.connect(file, timeout=60) as database:
        names = [row[1] for row in database.execute("PRAGMA table_info(jobs)")]
        columns = [values.get(name, f"template.{name}") for name in names]
        database.execute("CREATE TEMP TABLE template AS SELECT * FROM jobs WHERE state = 'queued' LIMIT 1")
        database.execute(
            f"WITH RECURSIVE copies(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM copies WHERE i + 1 < {num_jobs}) "
            f"INSERT INTO jobs ({', '.join(names)}) SELECT {', '.join(columns)} FROM copies, template"
        )
        database.execute(
            f"INSERT INTO attempts ({', '.join(attempt)}) SELECT {', '.join(attempt.values())} FROM jobs "
            f"WHERE id LIKE 'job_{PREFIX}%' AND current_attempt_id IS NOT NULL"
        )
    database.close()


def _id(kind: str) -> str:
    """Write the SQL of an id: 26 characters after the kind, which sort by `i`."""
    return f"'{kind}_{PREFIX}' || printf('%08x', i) || '0123456789abcde'"


def measure(server: Server, corpus: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure one server once. The keys name figure and unit."""
    figures = {"memory, idle, without Ray (MiB)": server.memory_mib()}
    connection = Connection(server.port)
    ids = [json.loads(connection.ask(submission(corpus), status=201))["id"] for _ in range(60)]
    connection.close()

    def latency(name: str, path: str, num_requests: int = options.requests) -> None:
        times_ms, cpu_ms = latencies_ms(server, get(path), num_requests)
        figures[f"{name}, p50 (ms)"] = statistics.median(times_ms)
        figures[f"{name}, p99 (ms)"] = statistics.quantiles(times_ms, n=100)[98]
        figures[f"{name}: CPU of each (ms)"] = cpu_ms

    latency("/healthz", "/healthz")
    latency("one job", f"/v1/jobs/{ids[-1]}")
    latency("page of 50", "/v1/jobs?limit=50")
    if options.history:
        add_history(server.database, options.history)
        name = f"{options.history} jobs"
        latency(f"page of 50, {name}", "/v1/jobs?limit=50")
        latency(f"one job, {name}", f"/v1/jobs/{ids[-1]}")
        latency(f"/metrics, {name}", "/metrics", max(10, options.requests // 10))
    return figures


def main() -> int:
    """Print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--requests", type=int, default=300, help="requests of each measurement of latency")
    parser.add_argument("--history", type=int, default=1_000_000, help="jobs that ended before; 0 leaves them out")
    options = parser.parse_args()

    def once(tree: Path, folder: Path, corpus: Path) -> dict[str, float]:
        with running(tree, folder) as server:
            return measure(server, corpus, options)

    return compare(options, "benchmarks.control_plane", "The control plane's HTTP API", once)


if __name__ == "__main__":
    raise SystemExit(main())
