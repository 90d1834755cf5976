"""The server that `benchmarks.control_plane` measures: API and dispatcher on SQLite, with the cluster in memory.

It is a script, not a module of the package: the code under test is the one that PYTHONPATH names.
"""

import argparse
import signal
from pathlib import Path

from octet.api_schemas import PoolConfig
from octet.service.cluster.fake import FakeLauncher
from octet.service.processes import embedded
from octet.service.processes.startup import database_of_one_machine, listening, log_to_stderr
from octet.service.settings import Settings


def main() -> None:
    """Serve until SIGTERM, as `octet serve` does, but without Ray."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--slots", type=int, default=1)
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    log_to_stderr()
    pools = (PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=options.slots),)
    settings = Settings(data_dir=options.data_dir, port=options.port, pools=pools)
    with listening(settings) as listeners:
        database = database_of_one_machine(settings)
        embedded.run(settings, database, FakeLauncher(pools), listeners)
        database.close()


if __name__ == "__main__":
    main()
