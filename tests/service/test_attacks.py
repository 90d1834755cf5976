"""Attacks of one client cost the others little: CPU and memory of the real app in its own process, never seconds.

Connections and checks that last are held while usual requests are made beside them. Requests that are sent again and again
are weighed by themselves: an API key is charged for a body, and wrong reports may cost no more than valid ones of their size.
"""

import http.client
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from octet.api_schemas import EventReport, JobSpec, JobState, LogReport, ReportBody
from octet.api_schemas.report import MAX_REPORTS_PER_BATCH
from octet.service.access.rates import COST_OF_VIOLATION, cost_of
from octet.service.app import create_app
from octet.service.cluster.fake import FakeLauncher
from octet.service.db.engine import Database
from octet.service.dispatcher import watch
from octet.service.http.bodies import MAX_REPORT_BYTES
from octet.service.ingest.apply import MAX_EVENTS
from octet.service.processes.server import http_server
from octet.service.processes.startup import freeze_what_is_there, listening
from octet.service.settings import Settings
from tests.kit.waiting import LONG_S
from tests.service.conftest import POOLS
from tests.service.test_check_processes import with_tokenizer
from tests.service.test_connections import connect
from tests.service.world import Rank, TurnedClock, World

Document = dict[str, Any]
MOST_TIMES = 2.0
NUM_USUAL = 30
NUM_ATTACKS = 8
MOST_GROWN_BYTES = 64 << 20

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        not Path("/proc/self/schedstat").exists(), reason="needs a kernel that counts CPU time by thread: Linux"
    ),
]


class WallClock(TurnedClock):
    """The time of a process that nobody turns a clock for."""

    def now(self) -> datetime:
        return datetime.now(UTC)


class Target:
    """The app in its own process, with two tenants. A rank of `modest` trains, and `greedy` attacks."""

    def __init__(self, process_id: int, port: int, world: World, spec: Document) -> None:
        self.process_id, self.port, self.world, self.spec = process_id, port, world, spec
        self.job_id, self.rank = world.start(tenant="modest")

    def send(self, path: str, body: bytes, token: str = "the key of the greedy") -> int:
        """Send a request on a connection of its own, and return the status of the answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)) as connection:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status

    def report(self, body: bytes, rank: Rank) -> int:
        return self.send(f"/internal/v1/attempts/{rank.order.attempt_id}/reports", body, rank.order.token)

    def heartbeat(self) -> None:
        assert self.report(self.rank.batch().model_dump_json().encode(), self.rank) == 200

    def check(self) -> None:
        assert self.send("/v1/jobs/validate", as_json(self.spec), "the key of the modest") == 200

    def submit(self) -> None:
        assert self.send("/v1/jobs", as_json(self.spec | {"resources": {"pool": "h100"}}), "the key of the modest") == 201

    def cpu_s(self, ask: Callable[[], object], times: int) -> float:
        """Return the CPU time that the process takes from a request to its answer, in all its threads: the median."""
        ask()
        taken = []
        for _ in range(times):
            before = self._cpu_ns()
            ask()
            taken.append(self._cpu_ns() - before)
        return statistics.median(taken) / 1e9

    def _cpu_ns(self) -> int:
        tasks = Path(f"/proc/{self.process_id}/task").iterdir()
        return sum(int(Path(task, "schedstat").read_text().split()[0]) for task in tasks)

    @contextmanager
    def growing_little(self) -> Iterator[None]:
        """Check that the process holds at most MOST_GROWN_BYTES more than before, also in between."""
        Path(f"/proc/{self.process_id}/clear_refs").write_text("5")  # VmHWM starts from what is in use
        before = self._memory("VmRSS")
        yield
        assert self._memory("VmHWM") - before < MOST_GROWN_BYTES

    def _memory(self, field: str) -> int:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{self.process_id}/status").read_text().splitlines())
        return int(lines[field].split()[0]) << 10

    def check_lease(self) -> None:
        """Check that a heartbeat renews the rank's lease, as a dispatcher sees it."""
        self.heartbeat()
        self.world.renew()
        watch.step(self.world.context)
        (attempt,) = self.world.attempts(self.job_id)
        assert attempt.lease_expires_at is not None
        assert attempt.lease_expires_at > self.world.clock.now()
        assert self.world.job(self.job_id).state is JobState.RUNNING

    @contextmanager
    def another_rank(self) -> Iterator[Rank]:
        """A rank of `greedy`, whose code has the token of its attempt."""
        _, rank = self.world.start(tenant="greedy")
        try:
            yield rank
        finally:
            rank.succeed()
            self.world.dispatch()


def _serve(settings: Settings, database_url: str, port: Any) -> None:
    with listening(settings) as (listener,):
        app = create_app(settings, database=Database(database_url))
        freeze_what_is_there()
        port.send(listener.getsockname()[1])
        http_server(app, settings).run(sockets=[listener])


@pytest.fixture(scope="module")
def target(fast_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    corpus = tmp_path_factory.mktemp("corpus")
    for name in ("a.txt", "b.txt"):
        (corpus / name).write_text("a line\n" * 1000)
    training = {"steps": 4, "global_batch_size": 4, "sequence_length": 32, "eval_batches": 2}
    spec = {"name": "usual", "model": "gpt-tiny", "precision": "fp32", "data": {"path": str(corpus)}, "training": training}
    keys = ("greedy:the key of the greedy", "modest:the key of the modest")
    with tempfile.TemporaryDirectory(dir=fast_dir) as folder:
        url = f"sqlite:///{folder}/octet.db"
        database = Database(url)
        database.migrate()
        settings = Settings(
            data_dir=Path(folder, "data"),
            port=0,
            pools=POOLS,
            api_keys=keys,
            data_roots=(tmp_path_factory.getbasetemp(),),
            requests_per_s=0,
            data_check_timeout_s=LONG_S,
        )
        world = World(database, WallClock(), settings, FakeLauncher(POOLS), JobSpec.model_validate(spec))
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        server = context.Process(target=_serve, args=(settings, url, sender))
        server.start()
        try:
            assert server.pid is not None
            yield Target(server.pid, receiver.recv(), world, spec)
        finally:
            server.kill()
            server.join()
            database.close()


def as_json(document: object) -> bytes:
    return json.dumps(document).encode()


def head(path: str, length: int | None = None) -> bytes:
    method, rest = (
        ("GET", "") if length is None else ("POST", f"Content-Type: application/json\r\nContent-Length: {length}\r\n")
    )
    key = "Authorization: Bearer the key of the greedy"
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{key}\r\n{rest}\r\n".encode()


WRONG_LABELS = {f"{'a b' * 10}{number}": [1] for number in range(20_000)}
OF_A_KEY: dict[str, tuple[str, Callable[[Document], object], int, int]] = {
    "a body over the limit": ("/v1/jobs", lambda spec: spec | {"labels": WRONG_LABELS}, 413, 0),
    "wrong labels": ("/v1/jobs", lambda spec: spec | {"labels": dict(list(WRONG_LABELS.items())[:600])}, 422, 100),
    "long globs": (
        "/v1/jobs",
        lambda spec: spec | {"data": spec["data"] | {"exclude": [f"{'*' * 200}{number}" for number in range(250)]}},
        422,
        0,
    ),
    "an object for a name": ("/v1/jobs", lambda _: {"training": {"preset": {}}}, 422, 4),
    "too many values": ("/v1/jobs", lambda spec: spec | {"labels": [[]] * 15_000}, 422, 0),
}
"""Attacks with an API key: path, body, answer, and the mistakes that are explained."""


@pytest.mark.parametrize("name", OF_A_KEY)
def test_a_body_costs_at_most_twice_what_its_key_is_charged_for(target: Target, name: str) -> None:
    path, make, status, num_explained = OF_A_KEY[name]
    body = as_json(make(target.spec))
    charged = cost_of(len(body), is_list=False) + COST_OF_VIOLATION * num_explained if status != 413 else 1.0
    with target.growing_little():
        answers: list[int] = []
        of_attack = target.cpu_s(lambda: answers.append(target.send(path, body)), NUM_ATTACKS)
    assert set(answers) == {status}
    assert of_attack / charged < MOST_TIMES * target.cpu_s(target.check, NUM_USUAL)
    target.heartbeat()
    target.check_lease()


def test_four_tokenizers_of_many_brackets_at_once_take_no_memory_of_the_api(target: Target, tmp_path: Path) -> None:
    """60 MB of settings had taken 0.9 GB of the API's memory. The lease of the rank is renewed meanwhile."""
    settings = f"[{'[],' * (4 << 20)}[]]"
    bodies = [as_json(with_tokenizer(target.spec, tmp_path / str(number), settings)) for number in range(4)]
    target.check()
    with target.growing_little(), ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(target.send, "/v1/jobs/validate", body) for body in bodies]
        target.heartbeat()
        assert {answer.result() for answer in answers} == {422}
    target.check_lease()


def test_events_without_end_cost_no_more_than_lines_of_the_log(target: Target) -> None:
    """An attempt stores 10,000 events at most, and the others of its batches are read for nothing."""
    text = "x" * 4000
    flood: dict[str, list[ReportBody]] = {
        "events": [EventReport(type="test.flood", message=text)] * MAX_REPORTS_PER_BATCH,
        "lines": [LogReport(level="INFO", message=text)] * MAX_REPORTS_PER_BATCH,
    }
    of_each = {}
    with target.another_rank() as rank:
        for name, bodies in flood.items():
            num_before = MAX_EVENTS // MAX_REPORTS_PER_BATCH if name == "events" else 0
            batches = [as_json(rank.batch(*bodies).model_dump(mode="json")) for _ in range(num_before + NUM_ATTACKS + 1)]
            assert {target.report(body, rank) for body in batches[:num_before]} <= {200}
            rest = iter(batches[num_before:])
            with target.growing_little():
                of_each[name] = target.cpu_s(lambda rest=rest: target.report(next(rest), rank), NUM_ATTACKS)
            target.heartbeat()
    assert of_each["events"] < of_each["lines"]
    target.check_lease()


def of_report(body: object) -> bytes:
    report = {"seq": 1, "at": "2026-01-01T00:00:00Z", "body": body}
    return as_json({"epoch": 1, "rank": 0, "reports": [report]})


LARGE = MAX_REPORT_BYTES - 100_000
OF_A_RANK: dict[str, Callable[[], bytes]] = {
    "unknown fields": lambda: as_json({"epoch": 1, "rank": 0} | {f"k{number}": 1 for number in range(500_000)}),
    "unknown fields of a report": lambda: of_report({"kind": "log"} | {f"k{number}": 1 for number in range(500_000)}),
    "many reports": lambda: as_json({"epoch": 1, "rank": 0, "reports": [1] * (LARGE // 3)}),
    "a thousand mistakes": lambda: as_json({"epoch": 1, "rank": 0, "reports": [{"seq": 0, "body": {}}] * 1000}),
    "a long line": lambda: of_report({"kind": "log", "level": "INFO", "message": "x" * LARGE}),
    "a long name": lambda: of_report({"kind": "x" * LARGE}),
    "brackets": lambda: b"[" * LARGE,
    "brackets in a report": lambda: of_report(None).replace(b"null", b"[" * (LARGE // 2) + b"]" * (LARGE // 2)),
    "a long number": lambda: b'{"epoch": ' + b"1" * LARGE + b"}",
}
"""Batches of a rank that has the token of its attempt, as the code of a user has."""


@pytest.mark.parametrize("name", OF_A_RANK)
def test_a_wrong_batch_of_reports_costs_at_most_twice_a_valid_one_of_its_size(target: Target, name: str) -> None:
    """7 MB of unknown fields had taken the event loop 1.1 s, in which no lease was renewed."""
    body = OF_A_RANK[name]()
    assert len(body) <= MAX_REPORT_BYTES
    with target.another_rank() as rank:
        valid = rank.batch().model_dump_json().encode().ljust(len(body))
        of_valid = target.cpu_s(lambda: target.report(valid, rank), NUM_ATTACKS)
        answers: list[int] = []
        with target.growing_little():
            of_attack = target.cpu_s(lambda: answers.append(target.report(body, rank)), NUM_ATTACKS)
        assert set(answers) <= {400, 422}
        assert of_attack < MOST_TIMES * of_valid
        target.heartbeat()
    target.check_lease()


def event_streams(target: Target, opened: ExitStack, _: Path) -> None:
    """All that one address may have open, at the address of the ranks."""
    for _ in range(192):
        stream = opened.enter_context(connect(target.port, head("/v1/stream?rows=limit%3D1")))
        assert stream.recv(4096).startswith(b"HTTP/1.1 200 ")


def bodies_that_do_not_come(target: Target, opened: ExitStack, _: Path) -> None:
    for _ in range(200):
        opened.enter_context(connect(target.port, head("/v1/jobs", 65_000) + b" " * 60_000))


def slow_checks(target: Target, opened: ExitStack, folder: Path) -> None:
    """Jobs whose files take some seconds of CPU to check: 4 are checked at once, and the others of this tenant wait.

    They go on once their clients are gone, so this attack is the last.
    """
    records = folder / "records.jsonl"
    records.write_text('{"prompt":"","completion":"x"}\n' * (1 << 21))
    for number in range(24):
        job = with_tokenizer(target.spec, folder / str(number), "{}")
        job["data"] = {"source": "jsonl", "path": str(records), "tokenizer": str(folder / str(number))}
        body = as_json(job)
        last = opened.enter_context(connect(target.port, head("/v1/jobs/validate", len(body)) + body))

    def check_that_it_waits() -> None:
        last.setblocking(False)
        with pytest.raises(BlockingIOError):
            last.recv(1)

    opened.callback(check_that_it_waits)


@pytest.mark.parametrize("attack", [event_streams, bodies_that_do_not_come, slow_checks])
def test_a_usual_request_costs_at_most_twice_itself_beside_what_stays(
    target: Target, tmp_path: Path, attack: Callable[[Target, ExitStack, Path], None]
) -> None:
    usual = (target.heartbeat, target.check, target.submit)
    before = [target.cpu_s(ask, NUM_USUAL) for ask in usual]
    with ExitStack() as opened, target.growing_little():
        attack(target, opened, tmp_path)
        beside = [target.cpu_s(ask, NUM_USUAL) for ask in usual]
    after = [target.cpu_s(ask, NUM_USUAL) for ask in usual]
    alone = map(max, zip(before, after, strict=True))  # a core that others have just used is slower
    times = {ask.__name__: taken / least for ask, taken, least in zip(usual, beside, alone, strict=True)}
    assert max(times.values()) <= MOST_TIMES, times
    target.check_lease()
