"""The dispatcher's threads: they run when woken, survive errors, and among several dispatchers one leads."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from api_schemas import JobSpec, JobState
from service import store
from service.cluster.fake import FakeLauncher
from service.db.engine import Database
from service.dispatcher import Dispatcher
from service.dispatcher.context import DispatcherContext, NotLeading
from service.dispatcher.loop import Loop
from service.settings import Settings
from tests.service.conftest import POOLS
from tests.service.world import TurnedClock, World

LONG_S = 3600.0


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_loop_runs_at_once_when_woken_and_stops_when_told() -> None:
    ran = threading.Semaphore(0)
    loop = Loop("test", ran.release, LONG_S)
    loop.start()
    assert ran.acquire(timeout=10), "it runs at the start"
    loop.wake()
    assert ran.acquire(timeout=10), "it runs when woken, not after an hour"
    loop.stop(10)
    loop.wake()
    assert not ran.acquire(timeout=0.05)


def test_a_loop_survives_its_step(caplog: pytest.LogCaptureFixture) -> None:
    ran = threading.Semaphore(0)
    failures = iter([RuntimeError("boom")])

    def step() -> None:
        for error in failures:
            raise error
        ran.release()

    loop = Loop("test", step, LONG_S)
    loop.start()
    assert ran.acquire(timeout=10)
    loop.stop(10)
    assert "the test loop failed, 1 in a row" in caplog.text


def test_a_job_runs_through_the_threads(database_url: str, settings: Settings, spec_document: dict[str, Any]) -> None:
    """The real dispatcher on the real clock; the test plays the rank."""
    database = Database(database_url)
    launcher = FakeLauncher(POOLS)
    dispatcher = Dispatcher(database, launcher, settings)
    dispatcher.start()
    try:
        world = World(database, RealClock(), settings, launcher, JobSpec.model_validate(spec_document), leads=False)
        job_id = world.submit()
        dispatcher.wake()
        wait_for(lambda: bool(launcher.orders))
        rank = world.rank_of(job_id)
        rank.begin()
        rank.succeed()
        dispatcher.wake()
        wait_for(lambda: world.attempts(job_id)[0].released_at is not None)
        assert world.job(job_id).state is JobState.SUCCEEDED
        assert launcher.orders == {}
    finally:
        dispatcher.stop()
    with database.read() as session:
        assert not store.queue.lease_is_held(session, store.queue.LEADER, database.now(session)), "it gave the lease back"
    database.close()


class RealClock(TurnedClock):
    def now(self) -> datetime:
        return datetime.now(UTC)


def test_of_two_dispatchers_one_leads_until_it_falls_silent(world: World) -> None:
    first = world.context
    second = DispatcherContext(world.database, world.launcher, world.settings, holder="second")
    second.lead()
    assert (first.leads_since is not None, second.leads_since) == (True, None)
    with pytest.raises(NotLeading), second.write():
        pass
    world.clock.turn(6)
    second.lead()
    first.lead()
    assert first.leads_since is None
    assert second.leads_since == world.clock.now()
    second.give_up()
    first.lead()
    assert first.leads_since is not None
