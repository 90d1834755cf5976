"""Random lives of the control plane: anything may happen in any order, and the invariants hold after each event.

At the end the cluster is reachable and time passes; then every job must be over and every slot free.
"""

import contextlib
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from octet.api_schemas import FailureReason, JobSpec, JobState, LogReport
from octet.service.dispatcher import launch, place, release, watch
from octet.service.errors import IllegalTransition, ServiceError
from octet.service.settings import Settings
from tests.service.conftest import POOLS, empty
from tests.service.databases import ON_BOTH
from tests.service.invariants import Kept, check_invariants
from tests.service.simulation import (
    Cluster,
    Fuse,
    MortalDatabase,
    MortalLauncher,
    MortalWorld,
    curve,
    settle,
    survive,
)
from tests.service.world import TurnedClock

SPEC: dict[str, Any] = {
    "name": "random",
    "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 64},
    "data": {"path": "/data"},
    "training": {"steps": 4, "global_batch_size": 4, "sequence_length": 32},
}


@lru_cache(maxsize=1)
def _settings() -> Settings:
    return Settings(data_dir=Path(tempfile.gettempdir(), "octet-unused"), pools=POOLS, cancel_grace_s=5)


class ControlPlane(RuleBasedStateMachine):
    """One life. The test sets `database_url`."""

    database_url = ""

    @initialize()
    def begin(self) -> None:
        clock = TurnedClock()
        database = self.opened(clock)
        database.fuse = Fuse()
        with database.write() as session:
            empty(session)
        launcher = MortalLauncher(POOLS)
        launcher.fuse = database.fuse
        self.world = MortalWorld(database, clock, _settings(), launcher, JobSpec.model_validate(SPEC))
        self.cluster = Cluster(self.world)
        self.jobs: list[str] = []
        self.kept: Kept | None = None

    def opened(self, clock: TurnedClock) -> MortalDatabase:
        """Open the life's database."""
        return MortalDatabase(self.database_url, clock)

    @rule(workers=st.integers(1, 2), priority=st.integers(0, 2), max_failures=st.integers(0, 2))
    def submit(self, workers: int, priority: int, max_failures: int) -> None:
        survive(
            self.world,
            lambda: self.jobs.append(self.world.submit(workers=workers, priority=priority, max_failures=max_failures)),
        )

    @precondition(lambda self: self.jobs)
    @rule(place=st.integers(0, 99), saves=st.booleans())
    def cancel(self, place: int, saves: bool) -> None:
        self.command(place, lambda job_id: self.world.cancel(job_id, saves=saves))

    @precondition(lambda self: self.jobs)
    @rule(place=st.integers(0, 99))
    def pause(self, place: int) -> None:
        self.command(place, self.world.pause)

    @precondition(lambda self: self.jobs)
    @rule(place=st.integers(0, 99))
    def resume(self, place: int) -> None:
        self.command(place, self.world.resume)

    @precondition(lambda self: self.jobs)
    @rule(place=st.integers(0, 99), more=st.integers(0, 2))
    def retry(self, place: int, more: int) -> None:
        steps = self.world.job(self.jobs[place % len(self.jobs)]).spec.training.steps
        assert steps is not None
        self.command(place, lambda job_id: self.world.retry(job_id, steps + more if more else None))

    @precondition(lambda self: self.jobs)
    @rule(place=st.integers(0, 99), priority=st.integers(0, 2))
    def change(self, place: int, priority: int) -> None:
        self.command(place, lambda job_id: self.world.change(job_id, priority=priority, labels={"team": str(priority)}))

    @precondition(lambda self: self.jobs)
    @rule(place=st.integers(0, 99))
    def delete(self, place: int) -> None:
        self.command(place, self.world.delete)
        self.jobs = [job_id for job_id in self.jobs if self.world.is_stored(job_id)]

    def command(self, place: int, command: Callable[[str], None]) -> None:
        """Send a command for one of the jobs, which may be in any state."""
        job_id = self.jobs[place % len(self.jobs)]
        with contextlib.suppress(IllegalTransition):
            survive(self.world, lambda: command(job_id))

    @rule(loop=st.sampled_from([place, launch, watch, release]))
    def one_loop(self, loop: Any) -> None:
        self.world.renew()
        survive(self.world, lambda: loop.step(self.world.context))

    @rule()
    def all_loops(self) -> None:
        survive(self.world, lambda: self.world.dispatch(self.look))

    @rule()
    def orphans(self) -> None:
        self.world.renew()
        survive(self.world, self.world.tidy)

    @rule()
    def workers_advance(self) -> None:
        for worker in self.cluster.live():
            survive(self.world, worker.advance)

    @rule()
    def a_worker_repeats_itself(self) -> None:
        """A log line is sent, its answer is lost, and it is sent again."""
        worker = next(iter(self.cluster.live()), None)
        if worker is not None and worker.unacknowledged is None:
            batch = worker.unacknowledged = worker.rank.batch(LogReport(level="INFO", message="again"))
            with contextlib.suppress(ServiceError):
                survive(self.world, lambda: worker.rank.deliver(batch))

    @rule(reason=st.sampled_from([FailureReason.WORKER_LOST, FailureReason.OUT_OF_MEMORY]))
    def a_worker_dies(self, reason: FailureReason) -> None:
        for worker in self.cluster.live()[:1]:
            worker.die(reason)

    @rule()
    def a_worker_fails_and_lingers(self) -> None:
        for worker in self.cluster.live()[:1]:
            survive(self.world, worker.fail_and_linger)

    @rule()
    def the_cluster_is_lost(self) -> None:
        self.world.launcher.lose_everything()

    @rule(reachable=st.booleans())
    def the_network(self, reachable: bool) -> None:
        self.world.launcher.reachable = reachable

    @rule(seconds=st.sampled_from([1, 3, 10, 80]))
    def time_passes(self, seconds: float) -> None:
        self.world.turn(seconds)

    @rule(seconds=st.sampled_from([0, 60, 400]))
    def the_control_plane_is_away(self, seconds: float) -> None:
        self.world.clock.turn(seconds)
        survive(self.world, self.world.restart)

    @rule(instants=st.integers(1, 8))
    def it_will_die(self, instants: int) -> None:
        self.world.database.fuse.set(instants)

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "world"):
            self.look()

    def look(self) -> None:
        """Check the invariants. What has not been written since the last look is not read again."""
        self.kept = check_invariants(self.world, self.kept, self.world.database.num_writes)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.database.fuse.set(0)
        self.world.launcher.reachable = True
        self.world.restart()
        settle(self.world, self.cluster)
        self.world.tidy()
        self.look()
        stored = {job.id: job.state for job in check_invariants(self.world).jobs}
        assert set(self.jobs) <= stored.keys(), "a job that was accepted is lost"
        for job_id, state in stored.items():
            if state is JobState.SUCCEEDED:
                assert curve(self.world, job_id) == [*range(1, (self.world.job(job_id).spec.training.steps or 0) + 1)]
        self.world.database.close()


@pytest.mark.slow
@ON_BOTH
@pytest.mark.parametrize("num_lives", [6, pytest.param(100, marks=pytest.mark.matrix)])
def test_random_lives_keep_every_promise(database_url: str, num_lives: int) -> None:
    class Here(ControlPlane):
        pass

    Here.database_url = database_url
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=num_lives // 2 if "postgres" in database_url else num_lives,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            print_blob=True,
        ),
    )
