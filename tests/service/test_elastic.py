"""Elastic jobs on a fake cluster: with fewer ranks while nodes are away, with more again after a checkpoint."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octet.api_schemas import AttemptState, CheckpointReport, FailureReason, FinishedReport, JobState, PhaseReport
from octet.service.scheduling.decide import is_worth_growing
from tests.service.databases import ON_SQLITE
from tests.service.world import Rank, World, step

ELASTIC: dict[str, Any] = {"resources": {"pool": "h100", "workers": {"min": 2, "max": 8}}, "max_failures": 3, "workers": 8}
NODE_SLOTS = 4


def begin(world: World, job_id: str, resumed_from_step: int = 0) -> Rank:
    """Place and launch the job's next attempt; its first rank trains."""
    world.dispatch()
    rank = world.rank_of(job_id)
    rank.begin(resumed_from_step)
    return rank


def checkpoint(step: int) -> CheckpointReport:
    return CheckpointReport(step=step, name=f"step_{step:010d}", num_bytes=1, sha256="0" * 64, loss=1.0)


def lose_a_node(world: World, job_id: str, rank: Rank) -> None:
    """Let a node go with its ranks, and wait until the job may start again."""
    world.launcher.slots_present["h100"] -= NODE_SLOTS
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_LOST, message="rank 5 of 8 is gone"))
    world.dispatch()
    world.turn(2)


def workers(world: World, job_id: str) -> list[int]:
    return [attempt.workers for attempt in world.attempts(job_id)]


def events(world: World, job_id: str, kind: str) -> list[str]:
    return [event.message for event in world.events(job_id) if event.type == kind]


def test_a_job_goes_on_with_fewer_ranks_when_a_node_is_lost_and_grows_back_after_a_checkpoint(world: World) -> None:
    job_id = world.submit(**ELASTIC)
    rank = begin(world, job_id)
    assert rank.order.spec.resources.workers == 8
    assert world.job(job_id).num_ranks == 8
    rank.send(checkpoint(2))
    lose_a_node(world, job_id, rank)

    rank = begin(world, job_id, resumed_from_step=2)
    assert workers(world, job_id) == [8, 4]
    assert world.job(job_id).num_ranks == 4
    spec = rank.order.spec
    assert (spec.resources.workers, spec.resources.min_workers) == (4, None)
    assert (spec.batch.global_batch_size, spec.batch.micro_batch_size, spec.batch.num_micro_batches) == (32, 4, 2)
    assert events(world, job_id, "job.resized") == ["goes on with 4 ranks after 8, at the same global batch: 4 slots were free"]

    world.launcher.slots_present["h100"] += NODE_SLOTS
    world.dispatch()
    world.turn(world.settings.elastic_grow_after_s)
    world.dispatch()
    assert world.job(job_id).state is JobState.RUNNING, "the last checkpoint is old: steps would be lost"
    rank.send(checkpoint(4))
    world.dispatch()
    assert world.job(job_id).state is JobState.QUEUED
    assert world.attempts(job_id)[-1].state is AttemptState.CANCELLED

    world.dispatch()  # the smaller attempt's processes are ended first
    rank = begin(world, job_id, resumed_from_step=4)
    assert workers(world, job_id) == [8, 4, 8]
    assert rank.order.checkpoints[0].step == 4
    assert rank.order.spec.batch.num_micro_batches == 1
    assert events(world, job_id, "job.resized")[1:] == [
        "goes on with 8 ranks after 4, at the same global batch: 8 slots were free"
    ]
    rank.succeed()
    job = world.job(job_id)
    assert (job.state, job.num_attempts, job.num_failures) == (JobState.SUCCEEDED, 3, 1)


def shrunk(world: World) -> tuple[str, Rank]:
    """An elastic job that trains on the only node that is there, of two."""
    world.launcher.slots_present["h100"] = NODE_SLOTS
    job_id = world.submit(**ELASTIC)
    return job_id, begin(world, job_id)


def wait_for_room(world: World) -> None:
    """Let the other node come, and its slots be free for as long as it takes."""
    world.launcher.slots_present["h100"] = 2 * NODE_SLOTS
    world.dispatch()
    world.turn(world.settings.elastic_grow_after_s)


@ON_SQLITE
def test_slots_that_have_just_come_are_not_taken_at_once(world: World) -> None:
    job_id, rank = shrunk(world)
    world.launcher.slots_present["h100"] = 2 * NODE_SLOTS
    rank.send(checkpoint(2))
    world.dispatch()
    world.turn(world.settings.elastic_grow_after_s - 1)
    rank.send(checkpoint(3))
    world.dispatch()
    assert world.job(job_id).state is JobState.RUNNING
    world.turn(1)
    world.dispatch()
    assert world.job(job_id).state is JobState.QUEUED


@ON_SQLITE
def test_a_job_grows_only_into_slots_that_nobody_waits_for(world: World) -> None:
    job_id, rank = shrunk(world)
    waiting = world.submit(resources={"pool": "h100", "workers": 8}, workers=8)
    wait_for_room(world)
    rank.send(checkpoint(2))
    world.dispatch()
    assert world.job(job_id).state is JobState.RUNNING
    world.cancel(waiting)
    world.dispatch()
    world.turn(world.settings.elastic_grow_after_s)
    rank.send(checkpoint(3))
    world.dispatch()
    assert world.job(job_id).state is JobState.QUEUED


@ON_SQLITE
def test_a_job_that_is_being_cancelled_does_not_grow(world: World) -> None:
    job_id, rank = shrunk(world)
    wait_for_room(world)
    rank.send(checkpoint(2))
    world.cancel(job_id)
    world.dispatch()
    assert world.job(job_id).state is JobState.CANCELLING


@ON_SQLITE
def test_too_few_slots_for_the_least_ranks_are_waited_for(world: World) -> None:
    world.launcher.slots_present["h100"] = 1
    job_id = world.submit(**ELASTIC)
    world.dispatch()
    assert world.job(job_id).state is JobState.QUEUED
    world.launcher.slots_present["h100"] = 3
    world.dispatch()
    assert workers(world, job_id) == [2], "three ranks do not divide the batch"


@ON_SQLITE
@pytest.mark.parametrize(("last_step", "grows"), [(10, True), (55, False)])
def test_a_job_that_is_nearly_done_does_not_start_again_to_grow(world: World, last_step: int, grows: bool) -> None:
    """Sixty steps of a second each, and 20 s to start: with twice the ranks, five steps are done no sooner."""
    world.launcher.slots_present["h100"] = NODE_SLOTS
    job_id = world.submit(**ELASTIC, steps=60)
    world.dispatch()
    world.turn(20)
    rank = world.rank_of(job_id)
    rank.begin()
    rank.send(PhaseReport(phase="first_step"))
    wait_for_room(world)
    rank.send(*(step(number).model_copy(update={"step_time_s": 1.0}) for number in range(1, last_step + 1)))
    rank.send(checkpoint(last_step))
    world.dispatch()
    assert (world.job(job_id).state is JobState.QUEUED) == grows


@given(workers=st.integers(1, 64), more=st.integers(1, 64), remaining_s=st.floats(0, 1e6), start_s=st.floats(0, 1e4))
def test_growing_never_makes_a_job_last_longer(workers: int, more: int, remaining_s: float, start_s: float) -> None:
    larger = workers + more
    if is_worth_growing(workers, larger, remaining_s, start_s):
        assert start_s + remaining_s * workers / larger < remaining_s
        assert is_worth_growing(workers, larger, 2 * remaining_s, start_s), "the more is left, the more it is worth"
    assert not is_worth_growing(workers, larger, 0.0, start_s)
