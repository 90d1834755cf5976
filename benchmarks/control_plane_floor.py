"""Time the least that a report can cost: a bare asyncio protocol that answers 200 once its body is on disk.

    python -m benchmarks.control_plane_floor --rounds 3 --seconds 3

The client, its requests and the machine are those of `benchmarks.control_plane_reports`, so this says what a server in this
language could reach there. Bodies become rows of one table, those of one turn of the event loop in one transaction of
SQLite with synchronous=FULL: in the event loop, or in a thread that the loop wakes and that wakes the loop.
"""

import argparse
import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.control_plane import Server
from benchmarks.control_plane_client import closed_loop
from benchmarks.control_plane_reports import NUM_ATTEMPTS, Rank
from benchmarks.control_plane_tables import compare, options_of

ANSWER = b'HTTP/1.1 200 OK\r\ncontent-length: 57\r\n\r\n{"desired":"run","lease_s":60.0,"acknowledged_seq":100000}'
KINDS = {"in the event loop": False, "in a thread": True}
MOST_PER_S = 20_000


class Store:
    """Bodies that wait for the next transaction, with the connections that sent them."""

    def __init__(self, path: Path, *, has_thread: bool) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "CREATE TABLE bodies (body BLOB)"):
            self._database.execute(statement)
        self._thread = ThreadPoolExecutor(1) if has_thread else None
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[bytes, asyncio.Transport]] = []
        self._is_writing = False

    def add(self, body: bytes, transport: asyncio.Transport) -> None:
        self._waiting.append((body, transport))
        if not self._is_writing:
            self._is_writing = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        taken, self._waiting = self._waiting, []
        self._is_writing = bool(taken)
        if not taken:
            return
        if self._thread is None:
            self._write(taken)
            self._answer(taken)
        else:
            self._thread.submit(self._write_and_tell, taken)

    def _write_and_tell(self, taken: list[tuple[bytes, asyncio.Transport]]) -> None:
        self._write(taken)
        self._loop.call_soon_threadsafe(self._answer, taken)

    def _write(self, taken: list[tuple[bytes, asyncio.Transport]]) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        values = ", ".join(["(?)"] * len(taken))
        self._database.execute(f"INSERT INTO bodies VALUES {values}", [body for body, _ in taken])
        self._database.execute("COMMIT")

    def _answer(self, taken: list[tuple[bytes, asyncio.Transport]]) -> None:
        for _, transport in taken:
            transport.write(ANSWER)
        self._begin()


class Bare(asyncio.Protocol):
    """Reads requests that have a Content-Length, one at a time."""

    store: Store

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if found and len(body) == int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0]):
            self._received = b""
            self.store.add(body, self._transport)


async def serve(folder: Path, *, has_thread: bool) -> None:
    """Serve until the process is ended. Writes the port to standard output."""
    Bare.store = Store(folder / "bodies.db", has_thread=has_thread)
    server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


def measure(folder: Path, options: argparse.Namespace, kind: str) -> dict[str, float]:
    """Measure a bare server once."""
    command = [sys.executable, "-m", "benchmarks.control_plane_floor", "--serve", kind, "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            server = Server(Path(), folder, int(process.stdout.readline()), process)  # type: ignore[arg-type]
            ranks = [Rank(server, f"att_{number:026d}", 1) for number in range(NUM_ATTEMPTS)]
            num_requests = int(MOST_PER_S * options.seconds / NUM_ATTEMPTS)
            waiting = [deque(rank.requests(num_requests, options.steps)) for rank in ranks]
            cpu_s = server.cpu_s()
            load = closed_loop(
                server.port, lambda number: waiting[number].popleft() if waiting[number] else None, len(ranks), options.seconds
            )
            return {
                f"commit {kind}: samples (1/s)": load.per_s * options.steps,
                f"commit {kind}: batches (1/s)": load.per_s,
                f"commit {kind}: CPU of each, server (ms)": (server.cpu_s() - cpu_s) / len(load.latencies_ms) * 1000,
                f"commit {kind}: CPU of each, client (ms)": load.client_cpu_ms,
            }
        finally:
            process.terminate()


def flush(folder: Path) -> dict[str, float]:
    """Measure the flush of a page to disk alone, which every commit waits for."""
    with (folder / "page").open("wb", buffering=0) as page:
        times_ms = []
        for _ in range(300):
            page.write(bytes(4096))
            began = time.perf_counter()
            os.fdatasync(page.fileno())
            times_ms.append((time.perf_counter() - began) * 1000)
    times_ms.sort()
    return {"flush of 4 KiB, least (ms)": times_ms[0], "flush of 4 KiB, median (ms)": times_ms[150]}


def main() -> int:
    """Print and write the table, or be the bare server."""
    parser = options_of(__doc__)
    parser.add_argument("--seconds", type=float, default=3, help="duration of each measurement")
    parser.add_argument("--steps", type=int, default=20, help="of each batch")
    parser.add_argument("--serve", choices=sorted(KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.folder, has_thread=KINDS[options.serve]))
        return 0

    def once(_tree: Path, folder: Path, _corpus: Path) -> dict[str, float]:
        figures = flush(folder)
        for kind in KINDS:
            (folder / kind).mkdir()
            figures |= measure(folder / kind, options, kind)
        return figures

    return compare(options, "benchmarks.control_plane_floor", "A bare server that stores bodies", "control-plane-floor", once)


if __name__ == "__main__":
    raise SystemExit(main())
