"""The server that `benchmarks.control_plane` measures: API and dispatcher on SQLite, with the cluster in memory.

It is a script, not a module of the package: the code under test is the one that PYTHONPATH names.
"""

import argparse
import signal
import sqlite3
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from octet.api_schemas import AttemptRef, PoolConfig, Probe, ProbeState
from octet.service.cluster.fake import FakeLauncher
from octet.service.processes import embedded
from octet.service.processes.startup import database_of_one_machine, listening, log_to_stderr
from octet.service.settings import Settings


class Probed(FakeLauncher):
    """A cluster on which every live attempt of the database runs. It writes a file once each of them was probed."""

    def __init__(self, pools: Iterable[PoolConfig], database: Path, written: Path) -> None:
        super().__init__(pools)
        with sqlite3.connect(database) as rows:
            live = rows.execute("SELECT id, epoch FROM attempts WHERE released_at IS NULL").fetchall()
        self._unseen = {AttemptRef(attempt_id=attempt_id, epoch=epoch) for attempt_id, epoch in live}
        self._written = written
        self._lock = threading.Lock()

    def probe(self, ref: AttemptRef) -> Probe:
        with self._lock:
            is_last = len(self._unseen) == 1 and ref in self._unseen
            self._unseen.discard(ref)
        if is_last:
            self._written.touch()
        return Probe(state=ProbeState.RUNNING, placed_at=datetime.now(UTC))


def main() -> None:
    """Serve until SIGTERM, as `octet serve` does, but without Ray."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--reconciled", type=Path, help="file to write once every live attempt was probed, with each alive")
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    log_to_stderr()
    pools = (PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=options.slots),)
    settings = Settings(data_dir=options.data_dir, port=options.port, pools=pools)
    with listening(settings) as listener:
        database = database_of_one_machine(settings)
        launcher = (
            Probed(pools, options.data_dir / "octet.db", options.reconciled) if options.reconciled else FakeLauncher(pools)
        )
        embedded.run(settings, database, launcher, listener)
        database.close()


if __name__ == "__main__":
    main()
