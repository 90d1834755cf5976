"""Kills the control plane at every instant that matters, one after the other; it must recover from each.

The instants are the moments before and after each commit and each call that changes the cluster. The story has a job that
fails and resumes, and one that is cancelled while it runs; it must end the same way every time.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import cycle
from typing import Any

import pytest

from octet.api_schemas import AttemptState, FailureReason, JobSpec, JobState, PoolConfig, PrecisionSpec
from octet.api_schemas.job_plan import JobPlan
from octet.api_schemas.plan import PlanRow, job_plan
from octet.service.dispatcher import launch, place
from octet.service.dispatcher.context import NotLeading
from octet.service.errors import IllegalTransition
from octet.service.settings import Settings
from tests.service.conftest import POOLS, empty
from tests.service.invariants import check_invariants
from tests.service.simulation import (
    Cluster,
    Fuse,
    MortalDatabase,
    MortalLauncher,
    MortalWorld,
    curve,
    is_settled,
    settle,
    survive,
)
from tests.service.world import TurnedClock, World


@pytest.fixture
def mortal(database_url: str, clock: TurnedClock) -> Iterator[MortalDatabase]:
    database = MortalDatabase(database_url, clock)
    database.fuse = Fuse()
    yield database
    database.close()


def new_world(database: MortalDatabase, clock: TurnedClock, settings: Settings, spec: dict[str, Any]) -> MortalWorld:
    database.fuse.set(0)
    with database.write() as session:
        empty(session)
    launcher = MortalLauncher(POOLS)
    launcher.fuse = database.fuse
    return MortalWorld(database, clock, settings, launcher, JobSpec.model_validate(spec))


def submit(world: World, key: str, **changes: Any) -> str:
    """Submit as a careful client does: with a key, and again if no answer came."""
    found: list[str] = []
    while not survive(world, lambda: found.append(world.submit(key, **changes))):
        pass
    return found[-1]


def cancel(world: World, job_id: str) -> None:
    """Cancel, and again if no answer came. The answer that the job is over counts too."""
    with contextlib.suppress(IllegalTransition):
        while not survive(world, lambda: world.cancel(job_id)):
            pass


def tell_the_story(world: MortalWorld, cluster_dies_too: bool) -> None:
    fuse = world.database.fuse
    cluster = Cluster(world)
    resumes = submit(world, "a", max_failures=1)
    stops = submit(world, "b", name="stops", priority=90, steps=1000)
    third_waits = submit(world, "c", name="waits", workers=2)
    was_burnt = fuse.burnt
    for round_ in range(60):
        world.clock.turn(1)
        survive(world, world.dispatch)
        for worker in cluster.live():
            survive(world, worker.advance)
        check_invariants(world)
        if round_ == 3:
            cancel(world, stops)
        first = next((worker for worker in cluster.workers.values() if worker.order.job_id == resumes), None)
        if first is not None and first.order.epoch == 1 and first.step == 2 and first.unacknowledged is None:
            first.die(FailureReason.WORKER_LOST)
        if cluster_dies_too and fuse.burnt and not was_burnt:
            world.launcher.lose_everything()
        was_burnt = fuse.burnt
        if is_settled(world):
            break
    survive(world, world.tidy)
    settle(world, cluster)
    check_invariants(world)
    assert len(world.all_jobs()) == 3, "no job is lost, none is stored twice"
    assert world.job(resumes).state is JobState.SUCCEEDED
    assert world.job(stops).state is JobState.CANCELLED
    assert world.job(third_waits).state is JobState.SUCCEEDED
    assert curve(world, resumes) == [1, 2, 3, 4]
    assert curve(world, third_waits) == [1, 2, 3, 4]
    never_twice = [(order.attempt_id, order.epoch) for order in world.launcher.started]
    assert len(never_twice) == len(set(never_twice)) or cluster_dies_too


def test_a_launch_whose_answer_was_lost_is_adopted(
    mortal: MortalDatabase, clock: TurnedClock, settings: Settings, spec_document: dict[str, Any]
) -> None:
    """The control plane dies after it started processes and before it wrote that; the next must not start them again."""
    world = new_world(mortal, clock, settings, spec_document)
    job_id = world.submit()
    world.renew()
    place.step(world.context)
    mortal.fuse.set(4)  # the claim has two instants, the launch two
    assert not survive(world, lambda: launch.step(world.context))
    assert len(world.launcher.orders) == 1
    assert world.attempts(job_id)[0].state is AttemptState.LAUNCHING
    world.dispatch()
    assert len(world.launcher.started) == 1
    assert world.attempts(job_id)[0].state is AttemptState.STARTING
    world.rank_of(job_id).begin()
    assert world.job(job_id).state is JobState.RUNNING, "the token of the first launch is the one that counts"


def test_a_launch_that_left_nothing_is_made_again_with_a_new_token(
    mortal: MortalDatabase, clock: TurnedClock, settings: Settings, spec_document: dict[str, Any]
) -> None:
    world = new_world(mortal, clock, settings, spec_document)
    job_id = world.submit()
    world.renew()
    place.step(world.context)
    mortal.fuse.set(3)
    assert not survive(world, lambda: launch.step(world.context))
    assert world.launcher.orders == {}
    world.dispatch()
    world.rank_of(job_id).begin()
    assert world.job(job_id).num_attempts == 1


def test_a_deposed_dispatcher_writes_nothing(
    mortal: MortalDatabase, clock: TurnedClock, settings: Settings, spec_document: dict[str, Any]
) -> None:
    world = new_world(mortal, clock, settings, spec_document)
    world.submit()
    old = world.context
    world.restart()
    with pytest.raises(NotLeading):
        place.step(old)
    old.lead()
    assert old.leads_since is None
    assert world.context.leads_since is not None


class Undecided:
    """A planner that answers at once, with another level each time."""

    def __init__(self) -> None:
        self._levels = cycle(("te", "O2", "O3-split"))

    def plan_job(self, job: JobSpec, pool: PoolConfig) -> "Future[JobPlan]":
        promise = Future[JobPlan]()
        row = PlanRow(level=next(self._levels), reason="undecided")  # type: ignore[arg-type]
        plan = job_plan(job.model_copy(update={"precision": PrecisionSpec(level=row.level)}), pool, [row], "1")
        promise.set_result(plan.model_copy(update={"asked_level": job.precision.level}))
        return promise

    def close(self) -> None:
        return None


def test_a_level_is_chosen_once_whenever_the_dispatcher_dies(
    mortal: MortalDatabase, clock: TurnedClock, settings: Settings, spec_document: dict[str, Any]
) -> None:
    """Before and after each commit of the plan, the placement and the launch: what is stored is what is trained."""
    pool = POOLS[0].model_copy(update={"memory_per_device_bytes": 10**9})
    planned = settings.model_copy(update={"pools": (pool, POOLS[1])})
    instant, burnt = 0, True
    while burnt:
        instant += 1
        world = new_world(mortal, clock, planned, spec_document)
        world.planning = world.context.planning = Undecided()
        job_id = world.submit(precision="auto")
        world.renew()
        mortal.fuse.set(instant)
        for _ in range(20):
            world.clock.turn(1)
            survive(world, world.dispatch)
        burnt = mortal.fuse.burnt
        mortal.fuse.set(0)
        job, (order,) = world.job(job_id), world.launcher.orders.values()
        assert job.plan is not None
        assert order.spec.precision.level == job.spec.precision.level == job.plan.level, f"after a crash at instant {instant}"
        types = [event.type for event in world.events(job_id)]
        assert types.count("job.not_planned") == 1, "the plan is stored once"
    assert instant > 6, "the story has become too short to prove anything"


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("cluster_dies_too", [False, True], ids=["cluster-lives", "cluster-dies-too"])
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["spread", "whole"])
def test_killed_at_every_instant_it_recovers(
    mortal: MortalDatabase,
    clock: TurnedClock,
    settings: Settings,
    spec_document: dict[str, Any],
    is_whole: bool,
    cluster_dies_too: bool,
) -> None:
    """A spread of the instants; in the matrix every one, and those of the renewals of the leader's lease too."""
    spread = (17 if cluster_dies_too else 11) if mortal.is_sqlite else (31 if cluster_dies_too else 19)
    stride = 1 if is_whole else spread
    instant, burnt = 0, True
    while burnt:
        instant += stride
        world = new_world(mortal, clock, settings, spec_document)
        world.dies_at_renewals = is_whole
        mortal.fuse.set(instant)
        try:
            tell_the_story(world, cluster_dies_too)
        except AssertionError as error:
            raise AssertionError(f"after a crash at instant {instant}: {error}") from error
        burnt = mortal.fuse.burnt
    assert instant > 50, "the story has become too short to prove anything"
