"""A server that stops has its jobs save a checkpoint: what ranks hear, and what becomes of the jobs."""

import pytest

from octet.api_schemas import AttemptState, DesiredState, FailureReason, FinishedReport, JobState
from tests.service.test_pause import GOODBYE, last_event, stop_at
from tests.service.world import World


def test_a_job_that_trains_makes_way_after_a_checkpoint_and_goes_on_from_it(world: World) -> None:
    job_id, rank = world.start()
    rank.train(1, 2)
    assert world.drain() == 1
    assert (world.job(job_id).state, world.job(job_id).desired_state) == (JobState.RUNNING, DesiredState.YIELD)
    world.resume(job_id)  # changes nothing: nobody has paused it
    assert rank.train(3).desired is DesiredState.YIELD
    stop_at(rank, 3)
    job = world.job(job_id)
    assert (job.state, job.desired_state, job.num_failures) == (JobState.QUEUED, DesiredState.RUN, 0)
    assert last_event(world, job_id) == (
        "job.queued",
        "made way; it goes on after step 3, from its checkpoint",
        {"checkpoint_step": 3},
    )
    assert world.attempts(job_id)[0].state is AttemptState.CANCELLED
    assert world.drain() == 0
    world.restart()
    world.dispatch()
    world.dispatch()
    again = world.rank_of(job_id)
    assert again.begin(3).desired is DesiredState.RUN
    again.train(4)
    again.succeed()
    assert world.job(job_id).state is JobState.SUCCEEDED


def test_an_attempt_that_was_never_heard_makes_way_at_once(world: World) -> None:
    job_id = world.submit()
    world.dispatch()
    assert world.drain() == 1
    assert (world.job(job_id).state, world.drain()) == (JobState.QUEUED, 0)


def test_workers_that_do_not_end_in_time_are_ended(world: World) -> None:
    job_id, rank = world.start()
    for _ in range(int(world.settings.save_grace_s / 20)):
        assert world.drain() == 1  # asks nobody twice, so the time runs on
        world.turn(20)
        rank.send()
    world.drain()
    assert (world.job(job_id).state, world.job(job_id).desired_state) == (JobState.QUEUED, DesiredState.RUN)


@pytest.mark.parametrize(("max_failures", "state"), [(1, JobState.QUEUED), (0, JobState.FAILED)])
def test_a_failure_meanwhile_counts_as_any_other(world: World, max_failures: int, state: JobState) -> None:
    job_id, rank = world.start(max_failures=max_failures)
    world.drain()
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_ERROR))
    job = world.job(job_id)
    assert (job.state, job.desired_state, job.num_failures) == (state, DesiredState.RUN, 1)


@pytest.mark.parametrize("is_pause", [True, False])
def test_what_the_user_asks_for_meanwhile_counts(world: World, *, is_pause: bool) -> None:
    job_id, rank = world.start()
    world.drain()
    (world.pause if is_pause else world.cancel)(job_id)
    world.drain()
    rank.train(1)
    stop_at(rank, 1)
    assert world.job(job_id).state is (JobState.PAUSED if is_pause else JobState.CANCELLED)


def test_a_paused_job_stays_paused(world: World) -> None:
    job_id, rank = world.start()
    world.pause(job_id)
    assert world.drain() == 1
    rank.send(GOODBYE)
    assert world.job(job_id).state is JobState.PAUSED
