"""Time submissions alone, on SQLite and PostgreSQL: as many as the server takes, and 200 per second with their latency.

    python -m benchmarks.control_plane_submissions --tree ../before --tree . --rounds 3 --write

Each tree (a checkout) gets a server and a database of its own and they take turns. Every job has a name and a learning rate
of its own, as in a sweep; `--corpora N` spreads them over N data sets. Both databases flush each commit: SQLite to the disk of
`--folder`, PostgreSQL to that of the temporary folder. The client is one thread that sends prepared bytes; its CPU time is in
the table, because it shares the cores with the server. PostgreSQL's own processes are not in the server's CPU time.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from benchmarks.control_plane import SPEC, Server, running
from benchmarks.control_plane_client import Make, closed_loop, paced
from benchmarks.control_plane_tables import compare, options_of
from tests.service.postgres_server import running_server

WARM_UP_S = 1.0


def submissions(corpora: list[Path]) -> Make:
    """Prepare requests of jobs that differ in their names and learning rates."""
    parts = []
    for corpus in corpora:
        training = {**SPEC["training"], "optimizer": {"learning_rate": 0.1111}}
        body = json.dumps(
            {**SPEC, "name": "job-00000000", "training": training, "data": {"source": "text", "path": str(corpus)}}
        )
        head = "POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        name, rest = request.split(b"00000000")
        parts.append((name, *rest.split(b"0.1111")))
    numbers = count(1)

    def make(_: int) -> bytes:
        number = next(numbers)
        before, between, after = parts[number % len(parts)]
        return b"%b%08d%b0.%04d%b" % (before, number, between, number % 9999 + 1, after)

    return make


def measure(server: Server, corpora: list[Path], options: argparse.Namespace) -> dict[str, float]:
    """Measure one server once. The keys name figure and unit."""
    make = submissions(corpora)
    closed_loop(server.port, make, options.connections, WARM_UP_S, status=201)
    cpu_s = server.cpu_s()
    load = closed_loop(server.port, make, options.connections, options.seconds, status=201)
    number = len(load.latencies_ms)
    figures = {
        f"{options.connections} connections (1/s)": load.per_s,
        "CPU of each: server (ms)": (server.cpu_s() - cpu_s) / number * 1000,
        "CPU of each: client (ms)": load.client_cpu_ms,
    }
    load = paced(server.port, make, options.rate, options.seconds, status=201)
    for percent in (50, 99):
        figures[f"at {options.rate:g}/s, p{percent} (ms)"] = load.percentile_ms(percent)
    return figures


@contextmanager
def settings_for(database: str) -> Iterator[dict[str, str]]:
    """Provide an empty database; yields the variables that name it to a server."""
    if database == "sqlite":
        yield {}
        return
    with running_server(is_durable=True) as url:
        yield {"OCTET_DATABASE_URL": url}


def main() -> int:
    """Print and write the table."""
    parser = options_of(__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append", help="repeat it for both (default)")
    parser.add_argument("--seconds", type=float, default=5, help="duration of each measurement")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rate", type=float, default=200, help="submissions per second of the measurement of latency")
    parser.add_argument("--corpora", type=int, default=1, help="data sets that the jobs take turns in reading")
    options = parser.parse_args()

    def once(tree: Path, folder: Path, corpus: Path) -> dict[str, float]:
        corpora = [corpus, *(folder / f"corpus-{number}.txt" for number in range(1, options.corpora))]
        for other in corpora[1:]:
            other.write_bytes(corpus.read_bytes())
        figures = {}
        for database in options.database or ["sqlite", "postgresql"]:
            with settings_for(database) as settings, running(tree, folder, settings=settings) as server:
                figures |= {f"{database}: {name}": value for name, value in measure(server, corpora, options).items()}
        return figures

    return compare(options, "benchmarks.control_plane_submissions", "Submissions", "submissions", once)


if __name__ == "__main__":
    raise SystemExit(main())
