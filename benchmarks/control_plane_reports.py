"""Time what ranks and watchers do to the control plane: heartbeats, metric samples, and many streams of one job's events.

    python -m benchmarks.control_plane_reports --tree . --tree ../before --write

The servers are those of `benchmarks.control_plane`: SQLite with synchronous=FULL, the cluster in memory. Each attempt reports
over a keep-alive connection of its own. The lag of an event is the time from its report's first byte to the subscriber's
last, in a client on the same machine that reads all streams in one thread.
"""

import argparse
import hashlib
import json
import os
import selectors
import socket
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.control_plane import Connection, Server, running, submission

TOKEN = "token-of-the-benchmark"
NUM_ATTEMPTS = 8
START_S = 60.0
SETTINGS = {"OCTET_MAX_CONNECTIONS_PER_ADDRESS": "0"}
EVENT_INTERVAL_S = 0.5


class Rank:
    """Rank 0 of an attempt, over one connection."""

    def __init__(self, server: Server, attempt_id: str, epoch: int) -> None:
        self._port = server.port
        self._connection = Connection(self._port)
        self._path = f"/internal/v1/attempts/{attempt_id}/reports"
        self._epoch = epoch
        self._num_sent = 0
        self.num_steps = 0

    def send(self, *bodies: dict[str, Any]) -> None:
        """Send one batch of reports; an empty one is a heartbeat."""
        at = datetime.now(UTC).isoformat()
        reports = [{"seq": self._num_sent + number, "at": at, "body": body} for number, body in enumerate(bodies, start=1)]
        self._num_sent += len(bodies)
        content = json.dumps({"epoch": self._epoch, "rank": 0, "reports": reports}).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self._connection.ask(head.encode() + content)

    def reconnect(self) -> None:
        """Connect again: the server closes a connection that was idle for some seconds."""
        self._connection.close()
        self._connection = Connection(self._port)

    def start(self) -> None:
        names = ("resumed_from_step", "num_layers_converted", "num_layers_skipped")
        fields = {"kind": "started", "node": "here", "device": "none", "world_size": 1, "num_parameters": 1}
        self.send(fields | dict.fromkeys(names, 0))

    def send_steps(self, num_steps: int) -> None:
        values = {
            "loss": 1.0,
            "gradient_norm": 1.0,
            "learning_rate": 1e-3,
            "tokens": 1000,
            "step_time_s": 0.1,
            "data_wait_s": 0.0,
        }
        steps = range(self.num_steps + 1, self.num_steps + num_steps + 1)
        self.num_steps += num_steps
        self.send(*({"kind": "step", "step": step, **values} for step in steps))


def ranks_of(server: Server, corpus: Path) -> tuple[list[Rank], list[str]]:
    """Submit jobs, wait until the cluster in memory has them, and give their attempts a token that we know."""
    connection = Connection(server.port)
    ids = [json.loads(connection.ask(submission(corpus), status=201))["id"] for _ in range(NUM_ATTEMPTS)]
    connection.close()
    deadline = time.monotonic() + START_S
    with sqlite3.connect(server.folder / "octet.db", timeout=60) as database:
        while True:
            found = "SELECT job_id, id, epoch FROM attempts WHERE state = 'starting'"
            attempts = {job_id: (attempt_id, epoch) for job_id, attempt_id, epoch in database.execute(found)}
            if len(attempts) == NUM_ATTEMPTS:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {len(attempts)} of {NUM_ATTEMPTS} attempts were launched")
            time.sleep(0.1)
        database.execute("UPDATE attempts SET token_hash = ?", (hashlib.sha256(TOKEN.encode()).digest(),))
    database.close()
    ranks = [Rank(server, *attempts[job_id]) for job_id in ids]
    for rank in ranks:
        rank.start()
    return ranks, ids


def per_second(server: Server, ranks: list[Rank], duration_s: float, act: Callable[[Rank], None]) -> tuple[float, float]:
    """Let all ranks act again and again at once; return how often they acted per second, and the server's CPU ms for each."""
    cpu_s = server.cpu_s()
    counts = [0] * len(ranks)
    ends_at = time.monotonic() + duration_s

    def run(number: int) -> None:
        while time.monotonic() < ends_at:
            act(ranks[number])
            counts[number] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ranks))]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total, elapsed_s = sum(counts), time.monotonic() - began
    return total / elapsed_s, (server.cpu_s() - cpu_s) / total * 1000


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
    beats, cpu_ms = per_second(server, ranks, options.seconds, Rank.send)
    figures = {f"heartbeats, {NUM_ATTEMPTS} connections (1/s)": beats, "heartbeat: CPU of each (ms)": cpu_ms}
    for size in (20, 1000):
        batches, cpu_ms = per_second(server, ranks, options.seconds, lambda rank, size=size: rank.send_steps(size))
        figures[f"metric samples, batches of {size} (1/s)"] = batches * size
        figures[f"batch of {size} samples: CPU of each (ms)"] = cpu_ms
    if not options.streams:
        return figures
    lags_ms, reports_ms = event_lags(server, ranks[0], job_ids[0], options.streams, options.events)
    figures[f"lag of events, {options.streams} streams, p50 (ms)"] = statistics.median(lags_ms)
    figures[f"lag of events, {options.streams} streams, p99 (ms)"] = statistics.quantiles(lags_ms, n=100)[98]
    figures["report meanwhile, p50 (ms)"] = statistics.median(reports_ms)
    figures["report meanwhile, slowest (ms)"] = max(reports_ms)
    return figures


def main() -> int:
    """Print and write the table."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, action="append", help="a checkout; repeat it to compare several (default: .)")
    parser.add_argument("--seconds", type=float, default=5, help="duration of each measurement of reports")
    parser.add_argument("--streams", type=int, default=1000, help="open streams of events; 0 leaves them out")
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("build"), help="folder on the disk that SQLite writes to")
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    options = parser.parse_args()
    trees: list[Path] = options.tree or [Path()]
    options.folder.mkdir(exist_ok=True)
    found = []
    for tree in trees:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            corpus = Path(folder, "corpus.txt").resolve()
            corpus.write_text("text to train on\n" * 1000)
            with running(tree, Path(folder).resolve(), slots=NUM_ATTEMPTS, settings=SETTINGS) as server:
                found.append(measure(server, corpus, options))
    lines = [
        f"# Reports and streams of the control plane, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m benchmarks.control_plane_reports {' '.join(sys.argv[1:])}`, {os.cpu_count()} CPU cores, load average "
        f"{os.getloadavg()[1]:.1f}, SQLite {sqlite3.sqlite_version}, synchronous=FULL.",
        "",
        f"| figure | {' | '.join(str(tree) for tree in trees)} |",
        f"| --- |{' ---: |' * len(trees)}",
        *(f"| {name} | {' | '.join(f'{each[name]:.2f}' for each in found)} |" for name in found[0]),
    ]
    report = "\n".join(lines) + "\n"
    sys.stdout.write(report)
    if options.write:
        (Path(__file__).parent / "results" / f"{datetime.now(UTC):%Y-%m-%d}-reports-and-streams.md").write_text(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
