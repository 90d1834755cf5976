"""A server that is killed again and again while a job trains: whoever follows the stream gets every point once."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import httpx
import pytest

from octet.api_schemas import EventReport, FailureReason, FinishedReport, LogReport
from octet.service import store
from tests.kit.ports import free_port
from tests.kit.waiting import LONG_S
from tests.service.test_stream_api import Browser, Message
from tests.service.world import World, step

ROOT = Path(__file__).parents[2]
_SERVE = """
import sys
from pathlib import Path
import uvicorn
from octet.service.app import create_app
from octet.service.db.engine import Database
from octet.service.settings import Settings
settings = Settings(data_dir=Path(sys.argv[1]))
app = create_app(settings, database=Database("sqlite:///" + sys.argv[2]))
uvicorn.run(app, port=int(sys.argv[3]), log_level="critical")
"""


@contextlib.contextmanager
def server(world: World, port: int) -> Iterator[None]:
    """Serve in a process of its own, and kill that at the end."""
    arguments = [str(world.settings.data_dir), str(world.database.path), str(port)]
    process = subprocess.Popen([sys.executable, "-c", _SERVE, *arguments], cwd=ROOT)
    try:
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def messages(port: int, query: str, last_id: str) -> Generator[Message, None, None]:
    """Follow the stream until the connection breaks. Waits for a server that starts."""
    give_up_at = time.monotonic() + LONG_S
    while time.monotonic() < give_up_at:
        with contextlib.suppress(httpx.TransportError):
            headers = {"Last-Event-ID": last_id} if last_id else {}
            url = f"http://127.0.0.1:{port}/v1/stream?{query}"
            with httpx.stream("GET", url, headers=headers, timeout=LONG_S) as answer:
                assert answer.status_code == 200, answer.read()
                fields: dict[str, str] = {}
                for line in answer.iter_lines():
                    name, _, value = line.partition(": ")
                    if line:
                        fields[name] = value
                    elif "data" in fields:
                        yield fields["event"], fields.get("id", ""), json.loads(fields["data"])
                        fields = {}
            return
        time.sleep(0.05)


class Training:
    """A job that reports a step, an event and a log line every 20 ms, until the block ends."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.job_id, self._rank = world.start(steps=100_000, max_failures=1)
        self.step, self._first_loss = 0, 1.0
        self._is_over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._train)

    def __enter__(self) -> "Training":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _train(self) -> None:
        while not self._is_over.wait(0.02):
            with self._lock:
                self.step += 1
                self._rank.send(
                    step(self.step, loss=round(self._first_loss + self.step / 1000, 3)),
                    LogReport(level="INFO", message=f"step {self.step}"),
                    EventReport(type="test.step", message=f"step {self.step}"),
                )

    def resume(self, after: int) -> None:
        """Lose the attempt. The next one resumes after a step, and has other losses."""
        with self._lock:
            self._rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_LOST, message="gone"))
            self._world.dispatch()
            self._world.turn(10)
            self._world.dispatch()
            self._rank = self._world.rank_of(self.job_id)
            self._rank.begin(resumed_from_step=after)
            self.step, self._first_loss = after, 2.0


def follow(browser: Browser, port: int, job_id: str, is_enough: Callable[[], bool]) -> None:
    """Follow all of a job from the last id on until there is enough."""
    query = "&".join(f"{part}={job_id}" for part in ("points", "events", "logs"))
    with contextlib.closing(messages(port, query, browser.last_id)) as arriving:
        for message in arriving:
            browser.take(message)
            if is_enough():
                break


@pytest.mark.system
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("num_kills", [4, pytest.param(20, marks=pytest.mark.matrix)])
def test_a_server_that_is_killed_loses_and_doubles_nothing(world: World, num_kills: int) -> None:
    """Reports go into the database all the time; half of the way the attempt is lost, and the next resumes from step 10."""
    browser, port = Browser(), free_port()
    with Training(world) as training:
        for kill in range(num_kills):
            if kill == num_kills // 2:
                training.resume(after=10)
            with server(world, port):
                wanted = training.step + 5
                follow(browser, port, training.job_id, lambda wanted=wanted: max(browser.curve, default=0) >= wanted)
    with world.database.read() as session:
        points = store.curves.points_after(session, training.job_id, 0, 100_000)
        head = store.jobs.heads(session, [training.job_id])[training.job_id]
    ends = {"event": head.last_event_seq, "log_line": head.last_log_seq}

    def is_whole() -> bool:
        last = {name: max(numbers, default=0) for name, numbers in browser.numbers.items()}
        return max(browser.curve) == points[-1].step and last == ends

    with server(world, port):
        follow(browser, port, training.job_id, is_whole)
    assert browser.curve == {point.step: point.loss for point in points}
    assert browser.numbers == {name: list(range(1, last + 1)) for name, last in ends.items()}
    assert (browser.curve[10], browser.curve[11]) == (1.01, 2.011)
