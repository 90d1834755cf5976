"""The dispatcher's threads: they run when woken, survive errors, and among several dispatchers one leads."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from octet.api_schemas import AttemptRef, FailureReason, JobSpec, JobState, PoolCapacity, Probe, ProbeState
from octet.service import store
from octet.service.cluster.fake import FakeLauncher
from octet.service.cluster.launcher import LauncherError
from octet.service.cluster.ray.embedded import hold_serve_lock
from octet.service.db.engine import Database
from octet.service.dispatcher import Dispatcher
from octet.service.dispatcher.context import DispatcherContext, NotLeading, holder_of
from octet.service.dispatcher.loop import Loop
from octet.service.settings import Settings
from octet.service.store.queue import LOOP_PRECISION
from octet.service.telemetry.loops import FAILING_S, WAITING_S, LoopHealth
from tests.kit.waiting import LONG_S, wait_until
from tests.service.conftest import POOLS, TestClient
from tests.service.world import TurnedClock, World

NEVER_S = 3600.0
"""An interval after which a loop does not run within a test."""


def test_a_loop_runs_at_once_when_woken_and_stops_when_told() -> None:
    ran = threading.Semaphore(0)
    loop = Loop("test", ran.release, NEVER_S)
    loop.start()
    assert ran.acquire(timeout=LONG_S), "it runs at the start"
    loop.wake()
    assert ran.acquire(timeout=LONG_S), "it runs when woken, not after an hour"
    loop.stop(LONG_S)
    loop.wake()
    assert not ran.acquire(timeout=0.05)


def run_until_it_works(failure: BaseException) -> None:
    """Start a loop whose first step fails, wait until a step has gone through, and stop it."""
    ran = threading.Semaphore(0)
    failures = iter([failure])

    def step() -> None:
        for error in failures:
            raise error
        ran.release()

    loop = Loop("test", step, NEVER_S)
    loop.start()
    assert ran.acquire(timeout=LONG_S)
    loop.stop(LONG_S)


@pytest.mark.parametrize("failure", [RuntimeError("boom"), SystemExit(1), KeyboardInterrupt("boom")])
def test_a_loop_survives_its_step(failure: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    run_until_it_works(failure)
    assert "the test loop failed, 1 in a row" in caplog.text


def test_a_database_that_is_away_takes_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """All loops fail while it is away. A trace for each would be 5,000 lines in a minute."""
    run_until_it_works(OperationalError("SELECT 1", None, Exception("the server is away\nIs it running?")))
    (record,) = caplog.records
    assert record.getMessage().endswith("the database: the server is away")
    assert record.exc_info is None


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
        wait_until(lambda: bool(launcher.orders))
        rank = world.rank_of(job_id)
        rank.begin()
        rank.succeed()
        dispatcher.wake()
        wait_until(lambda: world.attempts(job_id)[0].released_at is not None)
        assert world.job(job_id).state is JobState.SUCCEEDED
        assert launcher.orders == {}
    finally:
        dispatcher.stop()
    with database.read() as session:
        assert not store.queue.lease_is_held(session, store.queue.LEADER, database.now(session)), "it gave the lease back"
    database.close()


class LeavingLauncher(FakeLauncher):
    """A cluster whose client once leaves with SystemExit, as Ray's does when its raylet is gone."""

    has_left = False

    def capacity(self) -> Sequence[PoolCapacity]:
        if not self.has_left:
            self.has_left = True
            raise SystemExit(1)
        return super().capacity()


def test_a_job_runs_although_the_cluster_s_client_ends_the_program(
    database_url: str, settings: Settings, spec_document: dict[str, Any]
) -> None:
    """The client raises SystemExit inside a loop. The loop goes on, and its failure is counted."""
    database = Database(database_url)
    launcher = LeavingLauncher(POOLS)
    dispatcher = Dispatcher(database, launcher, settings)
    job_id = World(database, RealClock(), settings, launcher, JobSpec.model_validate(spec_document), leads=False).submit()
    dispatcher.start()
    try:
        wait_until(lambda: bool(launcher.orders))
    finally:
        dispatcher.stop()
    (family,) = dispatcher.health.collect()
    counted = {sample.labels["loop"]: sample.value for sample in family.samples if sample.name.endswith("_total")}
    loops = ("lead", "plan", "place", "reclaim", "launch", "watch", "release", "grow", "limit", "compare", "orphans")
    assert counted == dict.fromkeys(loops, 0) | {"place": 1}
    assert [order.job_id for order in launcher.started] == [job_id]
    database.close()


def test_ray_s_exit_is_an_error_of_the_cluster() -> None:
    from octet.service.cluster.ray.launcher import RayLauncher

    launcher = RayLauncher(lambda: sys.exit("the raylet is gone"), POOLS)
    with pytest.raises(LauncherError, match="the raylet is gone") as caught:
        launcher.capacity()
    assert caught.value.retryable
    launcher.close()


@pytest.mark.parametrize(
    ("nodes", "state", "reason"),
    [
        ([{"NodeID": "a", "Alive": False}], ProbeState.EXITED, FailureReason.NODE_LOST),
        ([{"NodeID": "a", "Alive": True}], ProbeState.EXITED, FailureReason.CLUSTER_LOST),
        (None, ProbeState.UNREACHABLE, None),
    ],
    ids=["its node is dead", "its node is alive", "no list of nodes came"],
)
def test_how_a_supervisor_died_waits_for_the_list_of_nodes(
    nodes: list[dict[str, Any]] | None, state: ProbeState, reason: FailureReason | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import ActorDiedError

    from octet.service.cluster.ray.launcher import RayLauncher

    launcher, ref = RayLauncher(lambda: "", POOLS), AttemptRef(attempt_id="a_1", epoch=1)
    answers: list[Any] = [Probe(state=ProbeState.PLACING, data={"node_id": "a"}), ActorDiedError(), nodes]

    def call(_launcher: RayLauncher, _deadline_s: float, _function: Any) -> Any:
        answer = answers.pop(0)
        if answer is None or isinstance(answer, Exception):
            raise LauncherError("the cluster does not answer", retryable=True) from answer
        return answer

    monkeypatch.setattr(RayLauncher, "_call", call)
    assert launcher.probe(ref).state is ProbeState.PLACING
    probe = launcher.probe(ref)
    assert (probe.state, probe.reason) == (state, reason)


class TestProgress:
    """A loop that makes none is named by `/readyz` and by a metric, and not before its deadline."""

    def test_a_silent_loop_is_reported_after_its_deadline_and_forgotten_when_it_goes_on(
        self, world: World, client: TestClient
    ) -> None:
        health = self.health_of(world)
        self.let_pass(world, WAITING_S - 1)
        assert client.get("/readyz").status_code == 200, "a call that starts the cluster may take this long"
        self.let_pass(world, 1 + LOOP_PRECISION.total_seconds())
        answer = client.get("/readyz")
        assert (answer.status_code, "loop launch makes no progress" in answer.json()["detail"]) == (503, True)
        assert 'octet_dispatcher_loop_stalled{loop="launch"} 1.0' in client.get("/metrics").text
        loops = {loop["name"]: loop["is_stalled"] for loop in client.get("/v1/loops").json()["data"]}
        assert loops["launch"] is True
        health.progressed()
        world.renew()
        assert client.get("/readyz").status_code == 200
        assert 'octet_dispatcher_loop_stalled{loop="launch"} 0.0' in client.get("/metrics").text

    def test_a_loop_that_fails_every_time_is_reported_sooner(self, world: World, client: TestClient) -> None:
        health = self.health_of(world)
        health.failed()
        self.let_pass(world, FAILING_S + LOOP_PRECISION.total_seconds())
        assert client.get("/readyz").status_code == 503

    def test_a_new_leader_has_its_own_loops(self, world: World, client: TestClient) -> None:
        self.health_of(world)
        self.let_pass(world, WAITING_S + LOOP_PRECISION.total_seconds())
        assert client.get("/readyz").status_code == 503
        world.restart()
        assert client.get("/readyz").status_code == 200

    def test_items_of_a_step_are_progress(self, world: World) -> None:
        health = self.health_of(world)
        world.context.executor = ThreadPoolExecutor(1)
        self.now_s += WAITING_S
        world.context.each(lambda _: None, [1])
        assert health.seconds_left() == {"launch": WAITING_S}
        with pytest.raises(SystemExit):
            world.context.each(sys.exit, [1])
        world.context.executor.shutdown()

    def health_of(self, world: World) -> LoopHealth:
        """Enter a loop named launch in this thread, on a clock that `let_pass` turns."""
        self.now_s = 0.0
        world.context.health = LoopHealth(lambda: self.now_s)
        world.context.health.enter("launch")
        world.renew()
        return world.context.health

    def let_pass(self, world: World, seconds: float) -> None:
        self.now_s += seconds
        world.turn(seconds)


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


def test_the_lease_of_a_server_that_ended_is_not_waited_for(world: World, settings: Settings) -> None:
    """`octet serve` knows from its data folder which process served there before."""
    former = DispatcherContext(world.database, world.launcher, settings, holder=holder_of(12345))
    world.context.give_up()
    former.lead()
    for pid, leads in [(12346, False), (12345, True)]:
        dispatcher = Dispatcher(world.database, world.launcher, settings)
        dispatcher.succeed(pid)
        dispatcher._lead()
        assert dispatcher.leads == leads
    with pytest.raises(NotLeading), former.write():
        pass


def test_a_data_folder_knows_its_former_server(tmp_path: Path) -> None:
    """The second server is refused while the first one runs. Once that has ended, the second gets its process id."""
    lock = "import sys; from pathlib import Path; from octet.service.cluster.ray.embedded import hold_serve_lock; "
    command = [sys.executable, "-c", lock + f"print(hold_serve_lock(Path({str(tmp_path)!r})), flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "None\n"
        with pytest.raises(RuntimeError, match="another `octet serve` uses"):
            hold_serve_lock(tmp_path)
        first.kill()
    assert subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout == f"{first.pid}\n"
