"""Measure the CPU time of usual reports, by thread, in process: no sockets, no dispatcher, no flush to disk.

    python -m benchmarks.control_plane_direct --tree ../before --tree . --rounds 3 --write

Prepared bytes are given to the connections of the HTTP server as the event loop would give them, those of all ranks in
one turn, and the next ones when all are answered. SQLite is in memory-backed files; `--database postgresql` starts one that
flushes nothing, in another process. The least of many windows is what tells two trees apart on a machine that others use
too. Each tree (a checkout) runs in processes of its own, in turns.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.control_plane_tables import compare, cpu_by_module, options_of
from benchmarks.control_plane_writes import TOKEN, Application
from tests.service.postgres_server import running_server

NUM_RANKS = 8
CASES = {"heartbeat": 0, "batch of 20 samples": 20}
ROUNDS_OF_WINDOW = 8


class _Transport(asyncio.Transport):
    """A connection of which nobody reads the answers. It counts them."""

    def __init__(self, answered: "_Answers") -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 8000)})
        self._answered = answered

    def write(self, data: Any) -> None:
        if not data.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"got {data.decode()}; expected status 200")
        self._answered.count()

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    abort = close


class _Answers:
    """Waits until all ranks have their answers."""

    def __init__(self) -> None:
        self._missing, self.are_here = 0, asyncio.Event()

    def expect(self, number: int) -> None:
        self._missing = number
        self.are_here.clear()

    def count(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.are_here.set()


def _cpu_s_by_thread() -> dict[str, float]:
    """CPU seconds so far of this process's threads that have names of ours, and of all together."""
    found = {"process": time.process_time()}
    for thread in threading.enumerate():
        assert thread.ident is not None, "a thread that was started has an identity"
        name = "event loop" if thread is threading.main_thread() else thread.name.rpartition("_")[0] or thread.name
        found[name] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN.decode()}\r\n"
    return head.encode() + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class Ranks:
    """Connections of ranks 0 to a server of the application."""

    def __init__(self, app: Application, ids: list[str]) -> None:
        from uvicorn.server import ServerState

        from service.processes.server import http_server
        from service.settings import Settings

        self._app, self._ids, self._answers, self._state = app, ids, _Answers(), ServerState()
        config = http_server(app.asgi, Settings(data_dir=Path(tempfile.gettempdir()))).config
        config.load()
        self._connections = [config.http_protocol_class(config=config, server_state=self._state, app_state={}) for _ in ids]
        for connection in self._connections:
            connection.connection_made(_Transport(self._answers))

    def requests(self, num_steps: int) -> list[bytes]:
        """Make the next request of each."""
        made = [self._app.steps(id_, num_steps) if num_steps else self._app.batch(id_) for id_ in self._ids]
        return [_request(*one) for one in made]

    async def send(self, requests: list[bytes]) -> None:
        """Let all send at once, and wait until all are answered."""
        self._answers.expect(len(requests))
        for connection, request in zip(self._connections, requests, strict=True):
            connection.data_received(request)
        await self._answers.are_here.wait()

    async def windows(self, num_steps: int, num_windows: int) -> Iterator[dict[str, float]]:
        """Measure windows; returns the CPU microseconds of each request, by thread."""
        found = []
        for _ in range(num_windows + 1):
            rounds = [self.requests(num_steps) for _ in range(ROUNDS_OF_WINDOW)]
            before = _cpu_s_by_thread()
            for requests in rounds:
                await self.send(requests)
            after, number = _cpu_s_by_thread(), ROUNDS_OF_WINDOW * len(self._ids)
            found.append({name: (after[name] - before.get(name, 0.0)) / number * 1e6 for name in after})
        return iter(found[1:])


async def measure(corpus: Path, num_windows: int, database: str) -> dict[str, float]:
    """Measure this process's tree."""
    found: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder,
        running_server() if database == "postgresql" else nullcontext() as url,
    ):
        app = Application(Path(folder), corpus, url)
        ranks = Ranks(app, await app.start(NUM_RANKS))
        for case, num_steps in CASES.items():
            windows = list(await ranks.windows(num_steps, num_windows))
            for thread in ("event loop", "octet-reports", "process"):
                times_us = [window.get(thread, 0.0) for window in windows]
                found[f"{case}, {thread}: least"] = min(times_us)
                found[f"{case}, {thread}: lower quartile"] = statistics.quantiles(times_us)[0]
        app.database.close()
    return found


def main() -> int:
    """Print and write the table, or measure one tree once and print its figures as JSON."""
    parser = options_of(__doc__)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--windows", type=int, default=60, help=f"measurements of {ROUNDS_OF_WINDOW} reports of each rank")
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    options = parser.parse_args()
    if options.corpus:
        print(json.dumps(asyncio.run(measure(options.corpus, options.windows, options.database))))  # noqa: T201
        return 0

    title = "CPU time of usual reports, by thread"
    module, given = "benchmarks.control_plane_direct", ("--windows", str(options.windows), "--database", options.database)
    return compare(options, module, title, "control-plane-direct", cpu_by_module(module, *given))


if __name__ == "__main__":
    raise SystemExit(main())
