"""Time submissions alone, on SQLite and PostgreSQL: as many as the server takes.

    python -m benchmarks.control_plane_submissions --tree ../before --tree . --rounds 3

Each tree (a checkout) gets a server and a database of its own and they take turns. Every job has a name and a learning rate
of its own, as in a sweep; in the mix that clients send, each request also has an API key, an idempotency key and one of 16
files of data. Both databases flush each commit: SQLite to the disk of `--folder`, PostgreSQL to that of the temporary folder.
The client is one thread that sends prepared bytes; its CPU time is in the table, because it shares the cores with the server,
and so is that of PostgreSQL's processes.
"""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from benchmarks.control_plane import SPEC, Server, running, running_apis
from benchmarks.control_plane_client import Make, closed_loop
from benchmarks.control_plane_tables import compare, options_of
from tests.service.postgres_server import running_server

WARM_UP_S = 1.0
API_KEY = "a key of the benchmark"
NUM_FILES = 16
"""Files of data in the mix that clients send: as many as there are connections, by default."""


def submissions(corpus: Path, *, is_mix: bool = False) -> Make:
    """Prepare requests of jobs that differ in their names and learning rates. is_mix: and in data and idempotency keys."""
    training = {**SPEC["training"], "optimizer": {"learning_rate": 0.1111}}
    data = {"source": "text", "path": f"{corpus}{'-file-0000' if is_mix else ''}"}
    body = json.dumps({**SPEC, "name": "job-00000000", "training": training, "data": data})
    head = "POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    if is_mix:
        head += f"Authorization: Bearer {API_KEY}\r\nIdempotency-Key: key-of-job-00000000\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode().replace(b"%", b"%%")
    template = (
        request.replace(b"00000000", b"%(number)08d")
        .replace(b"0.1111", b"0.%(rate)04d")
        .replace(b"-file-0000", b"-file-%(file)04d")
    )
    numbers = count(1)

    def make(_: int) -> bytes:
        number = next(numbers)
        return template % {b"number": number, b"rate": number % 9999 + 1, b"file": number % NUM_FILES}

    return make


def postgresql_cpu_s(url: str) -> float:
    """CPU seconds so far of all processes of the server of `running_server`, from its URL."""
    folder = Path(url.rpartition("host=")[2])
    postmaster = int((folder / "data" / "postmaster.pid").read_text().splitlines()[0])
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    ticks = _ticks(postmaster, with_ended=True) + sum(_ticks(int(child), with_ended=False) for child in children)
    return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int, *, with_ended: bool) -> int:
    """The CPU time of a process. with_ended: also that of its children which have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if with_ended else 13]))


def measure(server: Server, corpus: Path, options: argparse.Namespace, url: str | None) -> dict[str, float]:
    """Measure one server once. The keys name figure and unit. url: of its PostgreSQL."""
    make = submissions(corpus)
    closed_loop([server.port], make, options.connections, WARM_UP_S, status=201)
    cpu_s, database_cpu_s = server.cpu_s(), postgresql_cpu_s(url) if url else 0.0
    load = closed_loop([server.port], make, options.connections, options.seconds, status=201)
    number = load.num_answers
    figures = {
        f"{options.connections} connections (1/s)": load.per_s,
        "CPU of each: server (ms)": (server.cpu_s() - cpu_s) / number * 1000,
        "CPU of each: client (ms)": load.client_cpu_ms,
    }
    if url:
        figures["CPU of each: PostgreSQL (ms)"] = (postgresql_cpu_s(url) - database_cpu_s) / number * 1000
    return figures


def measure_mix(server: Server, corpus: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure one server once, with the mix that clients send."""
    for number in range(NUM_FILES):
        Path(f"{corpus}-file-{number:04d}").write_bytes(corpus.read_bytes())
    make = submissions(corpus, is_mix=True)
    closed_loop([server.port], make, options.connections, WARM_UP_S, status=201)
    cpu_s = server.cpu_s()
    load = closed_loop([server.port], make, options.connections, options.seconds, status=201)
    name = f"{options.connections} connections, clients' mix"
    return {
        f"{name} (1/s)": load.per_s,
        f"{name}: CPU of each: server (ms)": (server.cpu_s() - cpu_s) / load.num_answers * 1000,
    }


def measure_apis(servers: list[Server], corpus: Path, options: argparse.Namespace, url: str) -> dict[str, float]:
    """Measure several processes of `octet api` on one PostgreSQL, which get the connections in turns."""
    make, ports = submissions(corpus), [server.port for server in servers]
    num_connections = options.connections * len(servers)
    closed_loop(ports, make, num_connections, WARM_UP_S, status=201)
    cpu_s, database_cpu_s = sum(server.cpu_s() for server in servers), postgresql_cpu_s(url)
    load = closed_loop(ports, make, num_connections, options.seconds, status=201)
    number, name = load.num_answers, f"{len(servers)} api processes"
    return {
        f"{name} (1/s)": load.per_s,
        f"{name}: CPU of each: servers (ms)": (sum(server.cpu_s() for server in servers) - cpu_s) / number * 1000,
        f"{name}: CPU of each: PostgreSQL (ms)": (postgresql_cpu_s(url) - database_cpu_s) / number * 1000,
    }


@contextmanager
def settings_for(database: str) -> Iterator[dict[str, str]]:
    """Provide an empty database; yields the variables that name it to a server."""
    if database == "sqlite":
        yield {}
        return
    with running_server(is_durable=True) as url:
        yield {"OCTET_DATABASE_URL": url}


def main() -> int:
    """Print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append", help="repeat it for both (default)")
    parser.add_argument("--seconds", type=float, default=5, help="duration of each measurement")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--processes", type=int, action="append", help="of `octet api` on one PostgreSQL; repeat it")
    options = parser.parse_args()

    def once(tree: Path, folder: Path, corpus: Path) -> dict[str, float]:
        figures = {}
        for database in options.database or ["sqlite", "postgresql"]:
            with settings_for(database) as settings, running(tree, folder, settings=settings) as server:
                measured = measure(server, corpus, options, settings.get("OCTET_DATABASE_URL"))
                figures |= {f"{database}: {name}": value for name, value in measured.items()}
            with (
                settings_for(database) as settings,
                running(tree, folder, settings=settings | {"OCTET_API_KEYS": API_KEY}) as server,
            ):
                figures |= {f"{database}: {name}": value for name, value in measure_mix(server, corpus, options).items()}
        for number in options.processes or []:
            with (
                running_server(is_durable=True) as url,
                running_apis(tree, folder, url, number) as servers,
            ):
                measured = measure_apis(servers, corpus, options, url)
                figures |= {f"postgresql: {name}": value for name, value in measured.items()}
        return figures

    return compare(options, "benchmarks.control_plane_submissions", "Submissions", once)


if __name__ == "__main__":
    raise SystemExit(main())
