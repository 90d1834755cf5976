"""Measure the CPU time of each write of the control plane, in process: no sockets, no dispatcher, no other thread that works.

    python -m benchmarks.control_plane_writes --tree ../before --tree . --rounds 3

`benchmarks.control_plane` and `benchmarks.control_plane_reports` measure a whole server, whose fixed work per second counts
more the slower the machine is. Here the application is called as a server would call it, on SQLite in memory-backed files,
by several clients at once that wait for each other; the CPU time of the whole process, over the requests, is what a write
costs. Each tree (a checkout) runs in processes of its own, in turns.
"""

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.control_plane import SPEC
from benchmarks.control_plane_tables import compare, cpu_by_module, options_of

TOKEN = b"token-of-the-benchmark"
STEP = {"kind": "step", "loss": 1.0, "gradient_norm": 1.0, "learning_rate": 1e-3, "tokens": 1000, "step_time_s": 0.1}
STARTED = {"kind": "started", "node": "here", "device": "none", "world_size": 1, "num_parameters": 1, "resumed_from_step": 0}
CASES = {"heartbeat": (0, 8, 100), "batch of 20 samples": (20, 8, 30), "batch of 1000 samples": (1000, 8, 3)}
"""Reports of a batch, clients at once, and how often each sends one."""
CLIENTS = 16
SUBMISSIONS = {16: 30, 4: 60, 1: 100}
"""Submissions at once, and how often so many are sent."""


class Application:
    """The application of the tree that PYTHONPATH names, with a database of its own and attempts that train."""

    def __init__(self, folder: Path, corpus: Path, url: str | None = None) -> None:
        """url: of an empty database; None for one of SQLite in the folder."""
        from octet.api_schemas import PoolConfig
        from octet.service.app import create_app
        from octet.service.db.engine import Database
        from octet.service.settings import Settings

        pools = (PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=CLIENTS),)
        self.database = Database(url or f"sqlite:///{folder}/octet.db")
        self.database.migrate()
        self.asgi: Any = create_app(Settings(data_dir=folder, pools=pools), database=self.database)
        self._corpus = corpus
        self._num_jobs = 0
        self._num_reports: dict[str, int] = {}

    async def ask(self, path: str, body: bytes) -> Any:
        """Send a request and return the document of its answer. Raises RuntimeError for a refusal."""
        sent: list[dict[str, Any]] = []
        waiting = [{"type": "http.request", "body": body, "more_body": False}]
        headers = [(b"host", b"127.0.0.1:8000"), (b"content-type", b"application/json"), (b"authorization", b"Bearer " + TOKEN)]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "query_string": b"", "root_path": ""}
        scope |= {"headers": headers, "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000)}

        async def receive() -> dict[str, Any]:
            return waiting.pop()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.asgi(scope, receive, send)
        if sent[0]["status"] >= 300:
            raise RuntimeError(f"{path}: {sent[1]['body'].decode()}")
        return json.loads(sent[1]["body"])

    def job(self) -> bytes:
        """Make a submission; each has another name."""
        self._num_jobs += 1
        data = {"source": "text", "path": str(self._corpus)}
        return json.dumps({**SPEC, "name": f"job-{self._num_jobs}", "data": data}).encode()

    def batch(self, attempt_id: str, *bodies: dict[str, Any]) -> tuple[str, bytes]:
        """Make the path and the body of an attempt's next batch."""
        begin, at = self._num_reports.get(attempt_id, 0) + 1, datetime.now(UTC).isoformat()
        reports = [{"seq": begin + number, "at": at, "body": body} for number, body in enumerate(bodies)]
        self._num_reports[attempt_id] = begin - 1 + len(bodies)
        return f"/internal/v1/attempts/{attempt_id}/reports", json.dumps({"epoch": 1, "rank": 0, "reports": reports}).encode()

    def steps(self, attempt_id: str, num_steps: int) -> tuple[str, bytes]:
        """Make an attempt's next batch of steps."""
        begin = self._num_reports[attempt_id]  # the first report was of the start, so this is the next step too
        return self.batch(attempt_id, *({**STEP, "data_wait_s": 0.0, "step": begin + number} for number in range(num_steps)))

    async def start(self, num_attempts: int) -> list[str]:
        """Submit jobs and make their attempts train; returns the attempts' ids."""
        from sqlalchemy import text

        from octet.service import store
        from octet.service.jobs import attempts

        job_ids = [(await self.ask("/v1/jobs", self.job()))["id"] for _ in range(num_attempts)]
        ids = []
        with self.database.write() as session:
            for job_id in job_ids:
                job = store.jobs.lock_job(session, job_id)
                assert job is not None, "the job was submitted"
                ids.append(attempts.reserve(session, job, self.database.now(session)).id)
            session.flush()
            launched = "UPDATE attempts SET state = 'starting', token_hash = :hash"
            session.execute(text(launched), {"hash": hashlib.sha256(TOKEN).digest()})
        for attempt_id in ids:
            fields = STARTED | {"num_layers_converted": 0, "num_layers_skipped": 0}
            await self.ask(*self.batch(attempt_id, fields))
        return ids


async def measure(corpus: Path) -> dict[str, float]:
    """Measure this process's tree; returns the CPU microseconds of each request, by its kind: median and least."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        app = Application(Path(folder), corpus)
        ids = await app.start(8)

        async def repeat(name: str, make: Callable[[], list[tuple[str, bytes]]], num_rounds: int) -> None:
            times_us = []
            for _ in range(num_rounds + 1):
                requests = make()
                began = time.process_time()
                await asyncio.gather(*(app.ask(*request) for request in requests))
                times_us.append((time.process_time() - began) / len(requests) * 1e6)
            found[name] = statistics.median(times_us[1:])
            found[f"{name}, least"] = min(times_us[1:])

        for name, (num_steps, num_clients, num_rounds) in CASES.items():
            await repeat(name, lambda n=num_steps, k=num_clients: [app.steps(id_, n) for id_ in ids[:k]], num_rounds)
        for at_once, num_rounds in SUBMISSIONS.items():
            name = f"submission, {at_once} at once"
            await repeat(name, lambda n=at_once: [("/v1/jobs", app.job()) for _ in range(n)], num_rounds)
        app.database.close()
    return found


def main() -> int:
    """Print the table, or measure one tree once and print its figures as JSON."""
    parser = options_of(__doc__)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.corpus:
        print(json.dumps(asyncio.run(measure(options.corpus))))  # noqa: T201
        return 0

    title = "CPU time of the control plane's writes"
    module = "benchmarks.control_plane_writes"
    return compare(options, module, title, cpu_by_module(module))


if __name__ == "__main__":
    raise SystemExit(main())
