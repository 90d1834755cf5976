"""`octet api`, `octet ingest` and `octet dispatcher` as processes: what they refuse, and how they wait for peers."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.pool import NullPool
from typer.testing import CliRunner

from octet.api_schemas import JobSpec, JobState, PoolConfig
from octet.client import Client
from octet.client.cli import build_app
from octet.service import store
from octet.service.cluster.fake import FakeLauncher
from octet.service.cluster.ray.embedded import start_dying_with_us
from octet.service.cluster.ray.node import RayNode
from octet.service.db.engine import Database
from octet.service.db.migrate import known_revisions
from octet.service.jobs import commands
from octet.service.processes.api import ingest as ingest_process
from octet.service.processes.dispatcher import dispatch, serving_metrics, slots_wanted
from octet.service.processes.startup import cluster_settings
from octet.service.settings import Settings
from octet.service.telemetry.loops import LoopHealth
from tests.kit.ports import free_port
from tests.kit.waiting import LONG_S, wait_until
from tests.service.conftest import empty
from tests.service.postgres_server import server_or_skip
from tests.service.test_connections import connect, report, status
from tests.service.world import TurnedClock, World, step

ROOT = Path(__file__).parent.parent.parent
API_KEY = "a-key-for-tests-0123456789"


SCRAPED = ("/metrics", "/internal/v1/prometheus/targets")


class WallClock(TurnedClock):
    """The time of processes that nobody turns a clock for."""

    def now(self) -> datetime:
        return datetime.now(UTC)


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with server_or_skip() as url:
        yield url


@pytest.fixture
def environment(tmp_path: Path, spec_document: dict[str, Any]) -> dict[str, str]:
    """The configuration of the two processes, without the database."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OCTET_", "RAY_"))}
    (tmp_path / "key").write_text(f"{API_KEY}\n")
    (tmp_path / "token").write_text("0" * 64)
    return inherited | {
        "OCTET_HOST": "0.0.0.0",
        "OCTET_PORT": str(free_port()),
        "OCTET_API_KEYS_FILE": str(tmp_path / "key"),
        "OCTET_DATA_DIR": str(tmp_path / "data"),
        "OCTET_DATA_ROOTS": spec_document["data"]["path"],
        "OCTET_REPORT_URL": "http://127.0.0.1:1",
        "OCTET_RAY_ADDRESS": f"127.0.0.1:{free_port()}",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
    }


class Process:
    """One `octet` process and its log."""

    def __init__(self, log: Path, process: "subprocess.Popen[bytes]") -> None:
        self._log = log
        self.process = process

    def said(self, words: str) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        return words in self._log.read_text()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LONG_S)


@contextmanager
def running(command: str, environment: dict[str, str], log: Path, tree: Path = ROOT) -> Iterator[Process]:
    """tree: the folder of the code, of the processes that this one starts too (a check of files has another folder)."""
    environment = environment | {"PYTHONPATH": str(tree)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "octet.client.cli", command], stdout=file, stderr=file, cwd=tree, env=environment
        )
    try:
        yield Process(log, process)
    finally:
        process.kill()
        process.wait()


def has_loaded_ray(process: Process) -> bool:
    return "_raylet" in Path(f"/proc/{process.process.pid}/maps").read_text()


@pytest.mark.postgres
@pytest.mark.system
def test_jobs_are_taken_without_ray_and_wait_for_it(
    postgres_url: str, environment: dict[str, str], tmp_path: Path, spec_document: dict[str, Any]
) -> None:
    (tmp_path / "url").write_text(f"{postgres_url}\n")
    environment |= {"OCTET_DATABASE_URL_FILE": str(tmp_path / "url")}
    url = f"http://127.0.0.1:{environment['OCTET_PORT']}"
    with running("api", environment, tmp_path / "api.log") as api, Client(url, API_KEY, patience_s=LONG_S) as client:
        job = client.submit(spec_document)
        assert not client.is_ready(), "no dispatcher leads yet"
        metrics = f"127.0.0.1:{free_port()}"
        dispatchers = environment | {"OCTET_METRICS_ADDRESS": metrics}
        with running("dispatcher", dispatchers, tmp_path / "dispatcher.log") as dispatcher:
            wait_until(client.is_ready, poll_s=0.2)  # each look costs three processes some of the CPU that they start on
            scraped = httpx.get(f"http://{metrics}/metrics", trust_env=False).text
            assert "\noctet_dispatcher_is_leader 1.0\n" in scraped
            assert '\noctet_loop_failures_total{loop="place"} ' in scraped
            wait_until(lambda: dispatcher.said(f"the Ray head at {environment['OCTET_RAY_ADDRESS']} does not answer"))
            assert client.job(job.id).state is JobState.QUEUED
            assert dispatcher.end() == 0
        assert not client.is_ready(), "a dispatcher that ends hands its lease back"
        assert has_loaded_ray(api) is False
        assert api.end() == 0


@pytest.mark.postgres
@pytest.mark.system
def test_ranks_report_and_leases_last_while_no_api_process_turns(
    postgres_url: str, environment: dict[str, str], tmp_path: Path, spec_document: dict[str, Any]
) -> None:
    """The api gets no turn at all, as with an event loop that never ends its work, and has all the streams of one address."""
    internal_port = free_port()
    environment |= {"OCTET_DATABASE_URL": postgres_url}
    of_ingest = environment | {"OCTET_INTERNAL_ADDRESS": f"127.0.0.1:{internal_port}"}
    url, headers = f"http://127.0.0.1:{environment['OCTET_PORT']}", {"Authorization": f"Bearer {API_KEY}"}
    database = Database(postgres_url)
    database.migrate()
    pools = (PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=2),)
    settings = Settings(data_dir=tmp_path / "data", pools=pools)
    world = World(database, WallClock(), settings, FakeLauncher(pools), JobSpec.model_validate(spec_document))
    with (
        running("api", environment, tmp_path / "api.log") as api,
        running("ingest", of_ingest, tmp_path / "ingest.log") as ingest,
    ):
        for process in (api, ingest):
            wait_until(lambda process=process: process.said("Application startup complete"), poll_s=0.2)
        job_id, rank = world.start()
        stream = f"GET /v1/stream?rows=limit%3D1 HTTP/1.1\r\nHost: api\r\nAuthorization: Bearer {API_KEY}\r\n\r\n"
        with ExitStack() as stack:
            streams = [stack.enter_context(connect(int(environment["OCTET_PORT"]), stream.encode())) for _ in range(192)]
            assert all(each.recv(4096).startswith(b"HTTP/1.1 200 ") for each in streams)
            api.process.send_signal(signal.SIGSTOP)
            before = world.attempts(job_id)[0].lease_expires_at
            for number in range(1, 4):
                assert report(internal_port, rank, step(number)) == 200
            after = world.attempts(job_id)[0].lease_expires_at
            assert before is not None
            assert after is not None
            assert after > before
            assert status(internal_port, "/healthz") == 200
            found = {
                path: httpx.get(f"http://127.0.0.1:{internal_port}{path}", headers=headers, trust_env=False) for path in SCRAPED
            }
            assert [answer.status_code for answer in found.values()] == [200, 200]
            assert 'octet_jobs{pool="cpu",state="running"} 1.0' in found["/metrics"].text
            assert [status(internal_port, path) for path in ("/v1/jobs", "/", "/metrics")] == [404, 404, 401]
            api.process.send_signal(signal.SIGCONT)
        assert httpx.get(f"{url}/v1/jobs/{job_id}", headers=headers, trust_env=False).json()["progress"]["step"] == 3
        assert [ingest.end(), api.end()] == [0, 0]
    with database.write() as session:
        empty(session)  # the other tests of this module have the same database
    database.close()


def test_ingest_needs_the_internal_address(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ({"OCTET_DATABASE_URL": "postgresql://octet@postgres/octet"} | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="set OCTET_INTERNAL_ADDRESS"):
        ingest_process()


@pytest.mark.postgres
@pytest.mark.system
def test_processes_of_an_older_version_say_so_and_end(postgres_url: str, environment: dict[str, str], tmp_path: Path) -> None:
    """Change the schema's version while they run, as an upgrade does that did not stop them first."""
    (tmp_path / "url").write_text(f"{postgres_url}\n")
    environment |= {"OCTET_DATABASE_URL_FILE": str(tmp_path / "url")}
    logs = tmp_path / "api.log", tmp_path / "dispatcher.log"
    database = Database(postgres_url)

    def set_version(version: str) -> None:
        with database.write() as session:
            session.execute(text("UPDATE alembic_version SET version_num = :version"), {"version": version})

    with running("api", environment, logs[0]) as api, running("dispatcher", environment, logs[1]) as dispatcher:
        wait_until(lambda: api.said("Application startup complete"), poll_s=0.2)
        wait_until(lambda: dispatcher.said("runs attempts on the Ray cluster"), poll_s=0.2)
        try:
            set_version("9999")
            statuses = [each.process.wait(LONG_S) for each in (api, dispatcher)]
        finally:
            set_version(known_revisions()[-1])
            database.close()
    for log, ended in zip(logs, statuses, strict=True):
        assert ended == 2, log.read_text()
        assert "has schema '9999', and this version of Octet knows schemas up to" in log.read_text()
        assert "Traceback" not in log.read_text()


@pytest.fixture
def tree_before(tmp_path: Path) -> Path:
    """The code of the version before: that of the commit before the one that added the newest migration."""
    migration = f"service/db/migrations/versions/{known_revisions()[-1]}_*"
    found = subprocess.run(
        ["git", "log", "--diff-filter=A", "--format=%H~1", "-1", "--", migration], cwd=ROOT, capture_output=True, text=True
    )
    parts = ("octet", "service", "api_schemas", "client", "worker")
    archive = subprocess.run(["git", "archive", found.stdout.strip(), *parts], cwd=ROOT, capture_output=True)
    if found.returncode or archive.returncode:
        pytest.skip(f"the history has no version before: {found.stderr or archive.stderr!r}")
    (tmp_path / "before").mkdir()
    subprocess.run(["tar", "-x", "-C", str(tmp_path / "before")], input=archive.stdout, check=True)
    return tmp_path / "before"


def octet(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the version whose code is in a folder."""
    command = [sys.executable, "-m", "octet.client.cli", *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=LONG_S)


@pytest.mark.postgres
@pytest.mark.system
def test_the_version_before_takes_its_backup_back_after_an_upgrade(
    tree_before: Path, postgres_url: str, environment: dict[str, str], tmp_path: Path, spec_document: dict[str, Any]
) -> None:
    """Do what docs/deploy.md says: back up, upgrade, use it, stop, restore the backup with the version before, and go on."""
    server = make_url(postgres_url).set(drivername="postgresql+psycopg")
    with create_engine(server, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
        for name in ("used", "back"):
            connection.execute(text(f"CREATE DATABASE {name}"))
            of_name = server.set(drivername="postgresql", database=name)
            (tmp_path / name).write_text(of_name.render_as_string(hide_password=False))
    of_used = environment | {"OCTET_DATABASE_URL_FILE": str(tmp_path / "used")}
    url, backup = f"http://127.0.0.1:{environment['OCTET_PORT']}", str(tmp_path / "before.db")

    @contextmanager
    def served(environment: dict[str, str], tree: Path) -> Iterator[Client]:
        log = tmp_path / "api.log"
        with running("api", environment, log, tree) as api, Client(url, API_KEY, patience_s=LONG_S) as client:
            wait_until(lambda: api.said("Application startup complete"), poll_s=0.2)
            yield client
            assert api.end() == 0

    with served(of_used, tree_before) as client:
        before = client.submit(spec_document)
        made = octet(tree_before, "backup", backup, "--database-url-file", str(tmp_path / "used"))
        assert made.returncode == 0, made.stderr
    with served(of_used, ROOT) as client:
        assert client.job(before.id).spec == before.spec
        after = client.submit(spec_document)
    with running("api", of_used, tmp_path / "refused.log", tree_before) as refused:
        assert refused.process.wait(LONG_S) == 2
    known, newest = known_revisions()[-2:]
    words = f"the database has schema '{newest}', and this version of Octet knows schemas up to '{known}'"
    assert words in (tmp_path / "refused.log").read_text()
    for target in (["--database-url-file", str(tmp_path / "back")], ["--data-dir", str(tmp_path / "of-sqlite")]):
        restored = octet(tree_before, "restore", backup, *target)
        assert restored.returncode == 0, restored.stderr
    with served(environment | {"OCTET_DATABASE_URL_FILE": str(tmp_path / "back")}, tree_before) as client:
        assert {job.id for job in client.jobs()} == {before.id}
        assert client.submit(spec_document).id not in {before.id, after.id}


@pytest.mark.postgres
def test_the_queue_wants_slots_up_to_what_its_pool_may_have(postgres_url: str, spec_document: dict[str, Any]) -> None:
    pools = [PoolConfig(name=name, node_label=("octet-pool", name), slots=2) for name in ("cpu", "other")]
    database = Database(postgres_url)
    database.migrate()

    def submit(**changes: Any) -> None:
        with database.write() as session:
            spec = JobSpec.model_validate(spec_document | changes)
            commands.submit(session, spec, None, database.now(session))

    with database.write() as session:
        for job in store.job_queries.list_jobs(session, store.job_queries.JobFilter(states=[JobState.QUEUED]), 100, None):
            commands.cancel(session, job.id, database.now(session))
    assert slots_wanted(database, pools) == {"cpu": 0, "other": 0}
    submit()
    assert slots_wanted(database, pools) == {"cpu": 1, "other": 0}
    submit(resources={"pool": "cpu", "workers": 2})
    assert slots_wanted(database, pools) == {"cpu": 2, "other": 0}
    database.close()


def test_the_demo_waits_for_a_server_that_is_not_up_yet() -> None:
    began = time.monotonic()
    arguments = ["demo", "--url", f"http://127.0.0.1:{free_port()}", "--wait", "1", "--steps", "1"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 4, result.output
    assert time.monotonic() - began >= 1


@pytest.mark.system
@pytest.mark.parametrize("command", ["api", "dispatcher"])
def test_a_process_waits_for_a_database_that_is_away(command: str, environment: dict[str, str], tmp_path: Path) -> None:
    environment |= {"OCTET_DATABASE_URL": f"postgresql://octet@127.0.0.1:{free_port()}/octet"}
    with running(command, environment, tmp_path / "log") as process:
        wait_until(lambda: process.said("the database does not answer; trying again"))
        assert process.end() == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"OCTET_DATABASE_URL": ""}, "cluster mode needs a PostgreSQL database"),
        ({"OCTET_DATABASE_URL": "sqlite:///octet.db"}, "cluster mode needs a PostgreSQL database"),
        ({"OCTET_API_KEYS_FILE": ""}, "no API key is configured"),
        ({"OCTET_DATA_ROOTS": ""}, "OCTET_DATA_ROOTS"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    environment: dict[str, str], change: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"OCTET_DATABASE_URL": "postgresql://octet@postgres/octet"} | environment | change).items():
        if value:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        cluster_settings(None)


@pytest.mark.system
def test_the_command_says_in_one_line_what_to_change(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "octet.client.cli", "api", "--database-url-file", "/no/such/file"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LONG_S)
    assert result.returncode == 2
    assert "'/no/such/file', cannot be read: No such file" in result.stderr


def test_the_database_url_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("postgresql://octet:secret@postgres/octet\n")
    settings = cluster_settings(tmp_path / "url")
    assert settings.effective_database_url == "postgresql://octet:secret@postgres/octet"


def test_a_dispatcher_needs_the_address_for_reports_and_the_token(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("postgresql://octet@postgres/octet")
    with pytest.raises(ValueError, match="OCTET_REPORT_URL"):
        dispatch(ray_address="ray-head:6379", ray_token_file=tmp_path / "token", database_url_file=tmp_path / "url")


def test_a_dispatcher_needs_the_data_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks get the roots from it."""
    (tmp_path / "url").write_text("postgresql://octet@postgres/octet")
    (tmp_path / "token").write_text("0" * 64)
    monkeypatch.setenv("OCTET_REPORT_URL", "http://api:8000")
    with pytest.raises(ValueError, match="OCTET_DATA_ROOTS"):
        dispatch(ray_address="ray-head:6379", ray_token_file=tmp_path / "token", database_url_file=tmp_path / "url")


@pytest.mark.parametrize("address", ["ray-head", "6379", ":6379", "ray-head:port", ""])
def test_the_head_is_named_by_host_and_port(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        RayNode(address)


def test_no_node_is_started_for_a_head_that_does_not_answer() -> None:
    node = RayNode(f"127.0.0.1:{free_port()}")
    with pytest.raises(ConnectionError, match="does not answer"):
        node.ensure()
    node.stop()


def test_the_node_outlives_the_thread_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call to Ray has a thread of its own, and Linux sends a child's parent-death signal when a thread ends."""
    started: list[subprocess.Popen[bytes]] = []

    def start(_command: Any) -> "subprocess.Popen[bytes]":
        started.append(start_dying_with_us(["sleep", str(LONG_S)]))
        return started[-1]

    monkeypatch.setattr("octet.service.cluster.ray.node.start_dying_with_us", start)
    with socket.create_server(("127.0.0.1", 0)) as head:
        node = RayNode(f"127.0.0.1:{head.getsockname()[1]}")
        for _ in range(2):
            caller = threading.Thread(target=node.ensure)
            caller.start()
            thread = Path(f"/proc/self/task/{caller.native_id}")
            caller.join()
            wait_until(lambda thread=thread: not thread.exists())
        assert [process.poll() for process in started] == [None]
        started[0].kill()
        started[0].wait()
        node.ensure()
        assert [process.poll() for process in started] == [-signal.SIGKILL, None]
        node.stop()
        assert started[1].poll() == -signal.SIGTERM
        with pytest.raises(RuntimeError):
            node.ensure()


STARTER_THAT_IS_KILLED_AT_ONCE = """
import ctypes, os, signal, time
from octet.service.cluster.ray import embedded

prctl = ctypes.CDLL(None).prctl

class LateLibrary:
    def prctl(self, *arguments):
        parent = os.getppid()
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            time.sleep(0.01)
        prctl(*arguments)

embedded.ctypes.CDLL = lambda _: LateLibrary()
embedded.start_dying_with_us(["echo", "it runs"])
"""


def test_a_child_ends_whose_parent_was_killed_before_it_asked_for_the_signal() -> None:
    starter = subprocess.run([sys.executable, "-c", STARTER_THAT_IS_KILLED_AT_ONCE], stdout=subprocess.PIPE, cwd=ROOT)
    assert (starter.returncode, starter.stdout) == (-signal.SIGKILL, b"")  # the child holds stdout until it ends


@pytest.mark.parametrize("address", ["9464", "127.0.0.1:", "127.0.0.1:70000", ":9464"])
def test_an_address_of_metrics_that_cannot_be_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"), serving_metrics(address, LoopHealth(), lambda: False):
        pass


def test_an_address_of_metrics_that_is_taken_is_refused() -> None:
    with serving_metrics("127.0.0.1:0", LoopHealth(), lambda: False) as port:
        assert "octet_dispatcher_is_leader 0.0" in httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        with (
            pytest.raises(OSError, match="--metrics-address"),
            serving_metrics(f"127.0.0.1:{port}", LoopHealth(), lambda: True),
        ):
            pass
