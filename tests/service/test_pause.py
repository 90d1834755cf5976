"""Pause and resume a job, and cancel it with a checkpoint: what ranks hear, and what becomes of the job and its slots."""

import pytest

from octet.api_schemas import AttemptState, CheckpointReport, DesiredState, FailureReason, FinishedReport, JobState
from octet.service.errors import IllegalTransition
from tests.service.databases import ON_SQLITE
from tests.service.world import Rank, World

GOODBYE = FinishedReport(outcome="cancelled")


def saved(step: int) -> CheckpointReport:
    return CheckpointReport(step=step, name=f"step_{step:010}", num_bytes=1, sha256="0" * 64, loss=1.0)


def stop_at(rank: Rank, step: int) -> None:
    """Do what a rank does that hears of a stop: save, and end."""
    rank.send(saved(step), GOODBYE)


def last_event(world: World, job_id: str) -> tuple[str, str, object]:
    event = world.events(job_id)[-1]
    return event.type, event.message, event.data


@ON_SQLITE
def test_a_paused_job_frees_its_slots_and_goes_on_from_its_checkpoint(world: World) -> None:
    job_id, rank = world.start()
    world.pause(job_id)
    assert world.job(job_id).state is JobState.PAUSING
    assert rank.train(1, 2).desired is DesiredState.PAUSE
    stop_at(rank, 2)
    assert world.job(job_id).state is JobState.PAUSED
    assert last_event(world, job_id) == (
        "job.paused",
        "the job is paused; it will go on after step 2, from its checkpoint",
        {"checkpoint_step": 2},
    )
    world.dispatch()  # its processes have to be gone
    other, _ = world.start(workers=2)
    assert world.job(other).state is JobState.RUNNING, "the paused job holds no slots"
    world.cancel(other, saves=False)
    world.turn(world.settings.cancel_grace_s)
    world.dispatch()
    world.dispatch()
    world.resume(job_id)
    world.dispatch()
    again = world.rank_of(job_id)
    assert [checkpoint.step for checkpoint in again.order.checkpoints] == [2]
    assert again.begin(2).desired is DesiredState.RUN
    again.train(3, 4)
    again.succeed()
    job = world.job(job_id)
    assert (job.state, job.num_failures, job.num_attempts) == (JobState.SUCCEEDED, 0, 2)


@ON_SQLITE
def test_a_job_that_waits_is_held_at_once(world: World) -> None:
    job_id = world.submit()
    for _ in range(2):
        world.pause(job_id)
        assert world.job(job_id).state is JobState.PAUSED
    world.dispatch()
    assert world.launcher.started == []
    for _ in range(2):
        world.resume(job_id)
        assert world.job(job_id).state is JobState.QUEUED
    assert [event.type for event in world.events(job_id)] == ["job.accepted", "job.paused", "job.queued"]
    assert world.events(job_id)[1].message.endswith("it has no checkpoint")


@ON_SQLITE
def test_a_job_whose_workers_were_never_heard_is_paused_at_once(world: World) -> None:
    job_id = world.submit()
    world.dispatch()
    world.pause(job_id)
    world.dispatch()
    assert world.job(job_id).state is JobState.PAUSED
    assert world.attempts(job_id)[0].state is AttemptState.CANCELLED
    world.dispatch()
    assert world.launcher.orders == {}


@pytest.mark.parametrize(("max_failures", "state"), [(1, JobState.PAUSED), (0, JobState.FAILED)])
def test_a_failure_while_a_job_pauses_counts_as_any_other(world: World, max_failures: int, state: JobState) -> None:
    job_id, rank = world.start(max_failures=max_failures)
    world.pause(job_id)
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_ERROR))
    job = world.job(job_id)
    assert (job.state, job.num_failures) == (state, 1)


@ON_SQLITE
def test_a_job_that_ends_while_it_is_asked_to_pause_has_ended(world: World) -> None:
    job_id, rank = world.start()
    world.pause(job_id)
    rank.train(1, 2, 3, 4)
    rank.succeed()
    assert world.job(job_id).state is JobState.SUCCEEDED
    for command in (world.pause, world.resume):
        with pytest.raises(IllegalTransition, match=r"succeeded; .* Possible: retry with more steps"):
            command(job_id)


def test_a_cancellation_overrides_a_pause(world: World) -> None:
    job_id, rank = world.start()
    world.pause(job_id)
    with pytest.raises(IllegalTransition, match=r"pausing; resume is not possible\. Possible: cancel"):
        world.resume(job_id)
    world.cancel(job_id)
    with pytest.raises(IllegalTransition, match="cancelling; pause is not possible"):
        world.pause(job_id)
    rank.train(1)
    stop_at(rank, 1)
    assert world.job(job_id).state is JobState.CANCELLED
    held = world.submit()
    world.pause(held)
    world.cancel(held)
    assert world.job(held).state is JobState.CANCELLED


def test_a_cancellation_can_do_without_its_checkpoint_later(world: World) -> None:
    job_id, rank = world.start()
    world.cancel(job_id)
    assert rank.train(1).desired is DesiredState.CANCEL
    world.cancel(job_id, saves=False)
    assert rank.train(2).desired is DesiredState.CANCEL_NOW
    world.cancel(job_id)
    assert rank.train(3).desired is DesiredState.CANCEL_NOW, "a later request does not bring the checkpoint back"
    rank.send(GOODBYE)
    assert world.job(job_id).state is JobState.CANCELLED


@ON_SQLITE
def test_workers_have_time_to_save_and_not_for_ever(world: World) -> None:
    job_id, rank = world.start()
    world.pause(job_id)
    for _ in range(int(world.settings.save_grace_s / 20) - 1):
        world.turn(20)
        rank.send()
    world.dispatch()
    assert world.job(job_id).state is JobState.PAUSING
    world.turn(20)
    rank.send()
    world.dispatch()
    assert world.job(job_id).state is JobState.PAUSED
    world.dispatch()
    assert world.launcher.stopped == [rank.ref]


@ON_SQLITE
def test_workers_that_are_not_heard_any_more_do_not_hold_up_a_pause(world: World) -> None:
    job_id, _ = world.start(max_failures=1)
    world.pause(job_id)
    world.turn(world.settings.lease_s + world.settings.lease_grace_s)
    world.dispatch()
    assert world.job(job_id).state is JobState.PAUSED
    assert world.attempts(job_id)[0].reason is FailureReason.LEASE_EXPIRED
