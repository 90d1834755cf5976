"""A cluster is lost with its attempts: how long their ranks may still report, and what becomes of those that live on."""

import pytest

from octet.api_schemas import AttemptState, FailureReason
from octet.service.errors import StaleAttempt
from tests.service.simulation import curve
from tests.service.world import World


def test_ranks_that_were_silent_for_three_seconds_are_given_no_more_time(world: World) -> None:
    """A cluster that starts again is asked after seconds in which no rank reported."""
    job_id, _ = world.start(max_failures=1)
    world.turn(3)  # since this dispatcher leads, and since the last report
    world.launcher.lose_everything()
    world.dispatch()
    attempt = world.attempts(job_id)[0]
    assert (attempt.state, attempt.reason) == (AttemptState.FAILED, FailureReason.CLUSTER_LOST)


def test_ranks_that_reported_while_their_cluster_was_away_are_given_the_rest_of_three_seconds(world: World) -> None:
    job_id, rank = world.start(max_failures=1)
    world.turn(10)
    rank.train(1)
    world.turn(2)
    world.launcher.lose_everything()
    world.dispatch()
    assert world.attempts(job_id)[0].state is AttemptState.RUNNING
    world.turn(1)
    world.dispatch()
    assert world.attempts(job_id)[0].state is AttemptState.FAILED


def test_a_new_leader_gives_silent_ranks_three_seconds_of_its_own(world: World) -> None:
    """While no dispatcher led, perhaps no server took reports."""
    job_id, _ = world.start(max_failures=1)
    world.turn(10)
    world.launcher.lose_everything()
    world.restart()
    world.dispatch()
    assert world.attempts(job_id)[0].state is AttemptState.RUNNING
    world.turn(3)
    world.dispatch()
    assert world.attempts(job_id)[0].state is AttemptState.FAILED


def test_ranks_that_outlive_their_cluster_are_refused_from_the_end_of_their_attempt(world: World) -> None:
    """A head comes back empty on its port. Ray ends the dispatcher in that moment; the nodes of before live on for a minute."""
    job_id, rank = world.start(max_failures=1, steps=8)
    rank.train(1, 2)
    world.launcher.lose_everything()
    world.restart()  # of the dispatcher, at whatever point it was
    world.dispatch()
    rank.train(3)
    world.turn(3)
    world.dispatch()
    assert world.attempts(job_id)[0].reason is FailureReason.CLUSTER_LOST
    with pytest.raises(StaleAttempt):
        rank.train(4)
    world.turn(1)
    world.dispatch()
    following = world.rank_of(job_id)
    following.begin()
    following.train(1, 2)
    with pytest.raises(StaleAttempt):
        rank.train(4, 5)
    assert curve(world, job_id) == [1, 2]
    assert [attempt.epoch for attempt in world.attempts(job_id)] == [1, 2]
