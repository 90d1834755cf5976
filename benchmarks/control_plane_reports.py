"""Time what ranks and watchers do to the control plane: heartbeats, and many streams of one job's events.

    python -m benchmarks.control_plane_reports --tree . --tree ../before

The servers are those of `benchmarks.control_plane`: SQLite with synchronous=FULL; the cluster in memory. Each attempt reports
over a keep-alive connection of its own, and a client of one thread sends what was made before, so that it is not what limits
a rate; its CPU time is in the table, because it shares the cores with the server. The lag of an event is the time from its
report's first byte to the subscriber's last, in a client on the same machine that reads all streams in one thread.
"""

import argparse
import hashlib
import json
import selectors
import socket
import statistics
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

from benchmarks.control_plane import Connection, Server, running, submission
from benchmarks.control_plane_client import closed_loop
from benchmarks.control_plane_tables import compare, options_of

TOKEN = "token-of-the-benchmark"
NUM_ATTEMPTS = 8
START_S = 60.0
SETTINGS = {"OCTET_MAX_CONNECTIONS_PER_ADDRESS": "0", "OCTET_SAVE_GRACE_S": "1"}
"""The ranks are this client: none saves a checkpoint when the server ends."""
EVENT_INTERVAL_S = 0.5


class Rank:
    """Rank 0 of an attempt, over one connection."""

    def __init__(self, server: Server, attempt_id: str, epoch: int) -> None:
        self._port = server.port
        self._connection = Connection(self._port)
        self._path = f"/internal/v1/attempts/{attempt_id}/reports"
        self._epoch = epoch
        self._num_made = 0

    def request(self, *bodies: str) -> bytes:
        """Make the request with the next reports; one without reports is a heartbeat. The bodies are JSON."""
        at = datetime.now(UTC).isoformat()
        numbered = enumerate(bodies, start=self._num_made + 1)
        reports = ",".join([f'{{"seq":{seq},"at":"{at}","body":{body}}}' for seq, body in numbered])
        self._num_made += len(bodies)
        content = f'{{"epoch":{self._epoch},"rank":0,"reports":[{reports}]}}'
        head = f"POST {self._path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        return (head + content).encode()

    def send(self, body: dict[str, Any]) -> None:
        """Send one report and wait for the answer."""
        self._connection.ask(self.request(json.dumps(body)))

    def reconnect(self) -> None:
        """Connect again: the server closes a connection that was idle for some seconds."""
        self._connection.close()
        self._connection = Connection(self._port)

    def start(self) -> None:
        names = ("resumed_from_step", "num_layers_converted", "num_layers_skipped")
        fields = {"kind": "started", "node": "here", "device": "none", "world_size": 1, "num_parameters": 1}
        self.send(fields | dict.fromkeys(names, 0))


def ranks_of(server: Server, corpus: Path) -> tuple[list[Rank], list[str]]:
    """Submit jobs, wait until the cluster in memory has them, and give their attempts a token that we know."""
    connection = Connection(server.port)
    ids = [json.loads(connection.ask(submission(corpus), status=201))["id"] for _ in range(NUM_ATTEMPTS)]
    connection.close()
    deadline = time.monotonic() + START_S
    engine = create_engine(f"sqlite:///{server.database}")
    found = text("SELECT job_id, id, epoch FROM attempts WHERE state = 'starting'")
    attempts: dict[str, tuple[str, int]] = {}
    while len(attempts) < NUM_ATTEMPTS:
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {len(attempts)} of {NUM_ATTEMPTS} attempts were launched")
        time.sleep(0.1)
        with engine.connect() as database:
            attempts = {job_id: (attempt_id, epoch) for job_id, attempt_id, epoch in database.execute(found)}
    with engine.begin() as database:
        database.execute(text("UPDATE attempts SET token_hash = :hash"), {"hash": hashlib.sha256(TOKEN.encode()).digest()})
    engine.dispose()
    ranks = [Rank(server, *attempts[job_id]) for job_id in ids]
    for rank in ranks:
        rank.start()
    return ranks, ids


def heartbeat_load(server: Server, ranks: list[Rank], duration_s: float) -> dict[str, float]:
    """Let all ranks send heartbeats at once, each over a connection of its own.

    Returns heartbeats per second, and the CPU ms of each.
    """
    requests = [rank.request() for rank in ranks]
    cpu_s, name = server.cpu_s(), f"heartbeats, {NUM_ATTEMPTS} connections"
    load = closed_loop([server.port], lambda number: requests[number], len(ranks), duration_s)
    return {
        f"{name} (1/s)": load.per_s,
        f"{name}: CPU of each, server (ms)": (server.cpu_s() - cpu_s) / load.num_answers * 1000,
        f"{name}: CPU of each, client (ms)": load.client_cpu_ms,
    }


def event_lags(server: Server, rank: Rank, job_id: str, num_streams: int, num_events: int) -> tuple[list[float], list[float]]:
    """Report events to open streams of their job; return the lags at all streams and the times of the reports, in ms."""
    request = f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n".encode()
    selector, streams = selectors.DefaultSelector(), []
    for _ in range(num_streams):
        stream = socket.create_connection(("127.0.0.1", server.port), timeout=120)
        stream.sendall(request)
        while b"attempt.started" not in stream.recv(1 << 16):
            pass  # the stream has caught up once the attempt's last event so far has come
        stream.setblocking(False)
        selector.register(stream, selectors.EVENT_READ)
        streams.append(stream)
    sent_at: list[float] = []
    reports_ms: list[float] = []

    def report() -> None:
        rank.reconnect()
        for number in range(num_events):
            sent_at.append(time.perf_counter())
            rank.send({"kind": "event", "type": "benchmark.event", "message": f"number {number:04d}."})
            reports_ms.append((time.perf_counter() - sent_at[-1]) * 1000)
            time.sleep(EVENT_INTERVAL_S)

    sender = threading.Thread(target=report)
    sender.start()
    lags_ms: list[float] = []
    deadline = time.monotonic() + START_S + num_events * EVENT_INTERVAL_S
    while len(lags_ms) < num_streams * num_events and time.monotonic() < deadline:
        for key, _ in selector.select(1.0):
            stream = key.fileobj
            assert isinstance(stream, socket.socket)
            received = stream.recv(1 << 16)
            now = time.perf_counter()
            marks = received.split(b'"number ')[1:]
            lags_ms += [(now - sent_at[int(mark[:4])]) * 1000 for mark in marks]
    sender.join()
    for stream in streams:
        stream.close()
    if len(lags_ms) != num_streams * num_events:
        raise RuntimeError(f"{len(lags_ms)} of {num_streams * num_events} events arrived")
    return lags_ms, reports_ms


def measure(server: Server, corpus: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure one server once. The keys name figure and unit."""
    ranks, job_ids = ranks_of(server, corpus)
    figures = heartbeat_load(server, ranks, options.seconds)
    if not options.streams:
        return figures
    lags_ms, reports_ms = event_lags(server, ranks[0], job_ids[0], options.streams, options.events)
    figures[f"lag of events, {options.streams} streams, p50 (ms)"] = statistics.median(lags_ms)
    figures[f"lag of events, {options.streams} streams, p99 (ms)"] = statistics.quantiles(lags_ms, n=100)[98]
    figures["report meanwhile, p50 (ms)"] = statistics.median(reports_ms)
    figures["report meanwhile, slowest (ms)"] = max(reports_ms)
    return figures


def main() -> int:
    """Print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--seconds", type=float, default=5, help="duration of each measurement of reports")
    parser.add_argument("--streams", type=int, default=1000, help="open streams of events; 0 leaves them out")
    parser.add_argument("--events", type=int, default=20)
    options = parser.parse_args()

    def once(tree: Path, folder: Path, corpus: Path) -> dict[str, float]:
        with running(tree, folder, slots=NUM_ATTEMPTS, settings=SETTINGS) as server:
            return measure(server, corpus, options)

    title = "Reports and streams of the control plane"
    return compare(options, "benchmarks.control_plane_reports", title, once)


if __name__ == "__main__":
    raise SystemExit(main())
