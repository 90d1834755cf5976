"""A job takes no more slot hours than it may: it saves a checkpoint and is cancelled, and goes on once its limit is higher."""

import pytest

from octet.api_schemas import DesiredState, JobState
from octet.service.errors import IllegalTransition
from tests.service.databases import ON_SQLITE
from tests.service.invariants import check_invariants
from tests.service.test_pause import last_event, stop_at
from tests.service.world import Rank, World


def start(world: World, seconds: float, workers: int = 1) -> tuple[str, Rank]:
    """Start a job that may take some slot seconds."""
    job_id = world.submit(workers=workers)
    world.change(job_id, resources={"max_slot_hours": seconds / 3600})
    world.dispatch()
    rank = world.rank_of(job_id)
    rank.begin()
    return job_id, rank


def test_a_job_stops_after_a_checkpoint_and_goes_on_with_a_higher_limit(world: World) -> None:
    job_id, rank = start(world, seconds=20, workers=2)
    world.turn(9)
    world.dispatch()
    assert rank.train(1).desired is DesiredState.RUN
    world.turn(2)
    world.dispatch()
    assert rank.train(2).desired is DesiredState.CANCEL
    stop_at(rank, 2)
    job = world.job(job_id)
    assert (job.state, job.reason) == (JobState.CANCELLED, None)
    assert job.message == "it has taken 0.00611 of 0.00556 slot hours, its limit"
    with pytest.raises(IllegalTransition, match=r"resources\.max_slot_hours first"):
        world.retry(job_id)
    world.change(job_id, resources={"max_slot_hours": None})
    assert last_event(world, job_id)[1] == "changed: limit is none"
    world.retry(job_id)
    assert world.job(job_id).message is None
    world.dispatch()
    world.dispatch()
    again = world.rank_of(job_id)
    assert [checkpoint.step for checkpoint in again.order.checkpoints] == [2]
    again.begin(2)
    world.turn(50)
    world.dispatch()
    assert again.train(3, 4).desired is DesiredState.RUN
    again.succeed()
    check_invariants(world)


@ON_SQLITE
def test_attempts_add_up_and_waiting_costs_nothing(world: World) -> None:
    job_id, rank = start(world, seconds=20)
    world.turn(15)
    world.dispatch()
    world.pause(job_id)
    rank.train(1)
    stop_at(rank, 1)
    world.turn(1000)
    world.resume(job_id)
    world.dispatch()
    world.dispatch()
    again = world.rank_of(job_id)
    again.begin(1)
    world.turn(4)
    world.dispatch()
    assert again.train(2).desired is DesiredState.RUN
    world.turn(2)
    world.dispatch()
    assert again.train(3).desired is DesiredState.CANCEL


@ON_SQLITE
def test_a_job_that_somebody_pauses_is_not_cancelled(world: World) -> None:
    job_id, rank = start(world, seconds=5)
    world.pause(job_id)
    world.turn(10)
    world.dispatch()
    assert rank.train(1).desired is DesiredState.PAUSE
    stop_at(rank, 1)
    with pytest.raises(IllegalTransition, match=r"resources\.max_slot_hours first"):
        world.resume(job_id)
    assert world.job(job_id).state is JobState.PAUSED
