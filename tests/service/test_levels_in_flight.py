"""Jobs go on at another level: by a change that somebody asks for, or up their ladder when the loss is off."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import DesiredState, FailureReason, FinishedReport, JobState
from octet.service.errors import IllegalTransition, InvalidRequest
from tests.service.databases import ON_SQLITE
from tests.service.invariants import check_invariants
from tests.service.test_jobs_api import problem_of
from tests.service.test_pause import last_event, saved, stop_at
from tests.service.test_retry import fail
from tests.service.world import World

LADDER = {"level": "O3-split", "ladder": ["O2", "bf16-amp"]}
OFF = {reason: FinishedReport(outcome="failed", reason=reason) for reason in FailureReason if reason.calls_for_precision}


def at_level(level: str) -> dict[str, Any]:
    return {"precision": {"level": level}}


@ON_SQLITE
def test_a_job_that_trains_saves_a_checkpoint_and_goes_on_at_the_new_level(world: World) -> None:
    job_id, rank = world.start(**at_level("O3-split"))
    assert rank.train(1).desired is DesiredState.RUN
    for _ in range(2):
        world.change(job_id, **at_level("O2"))
        assert last_event(world, job_id)[:2] == ("job.changed", "changed: level is O2, was O3-split")
    assert rank.train(2).desired is DesiredState.YIELD
    stop_at(rank, 2)
    world.dispatch()
    world.dispatch()
    again = world.rank_of(job_id)
    assert (again.order.spec.precision.level, [each.step for each in again.order.checkpoints]) == ("O2", [2])
    again.begin(2)
    assert again.train(3, 4).desired is DesiredState.RUN
    again.succeed()
    job = world.job(job_id)
    assert (job.state, job.spec.precision.level, job.num_failures) == (JobState.SUCCEEDED, "O2", 0)
    check_invariants(world)


def test_a_job_that_waits_or_has_failed_goes_on_at_the_new_level(world: World) -> None:
    waiting, failed = world.submit(**at_level("O2")), fail(world, **at_level("O2"))
    for job_id in (waiting, failed):
        world.change(job_id, precision="te")
        assert world.job(job_id).spec.precision.level == "te"
    world.retry(failed)
    for _ in range(3):
        world.dispatch()
    assert {world.rank_of(job_id).order.spec.precision.level for job_id in (waiting, failed)} == {"te"}


def test_an_attempt_that_was_never_launched_ends_at_once(world: World) -> None:
    job_id = world.submit(**at_level("O2"))
    world.dispatch()
    world.change(job_id, **at_level("te"))
    world.dispatch()
    world.dispatch()
    world.dispatch()
    assert world.rank_of(job_id).order.spec.precision.level == "te"


@ON_SQLITE
def test_a_level_that_the_job_cannot_have_is_refused_and_changes_nothing(world: World) -> None:
    job_id = world.submit(precision={"level": "O2", "recipe": {"granularity": "row"}})
    with pytest.raises(InvalidRequest, match="recipe"):
        world.change(job_id, **at_level("bf16-amp"))
    assert world.job(job_id).spec.precision.level == "O2"
    done, rank = world.start(**at_level("O2"))
    rank.train(1, 2, 3, 4)
    rank.succeed()
    with pytest.raises(IllegalTransition, match="it is succeeded"):
        world.change(done, **at_level("te"))


@ON_SQLITE
def test_arms_of_a_comparison_keep_their_levels(client: TestClient, world: World, spec_document: dict[str, Any]) -> None:
    asked = {"job": spec_document, "levels": ["fp32", "O1"], "seeds": 2}
    assert client.post("/v1/comparisons", json=asked).status_code == 201
    world.dispatch()
    child = world.all_jobs()[0].id
    problem = problem_of(client.patch(f"/v1/jobs/{child}", json={"precision": "te"}), 409)
    assert "part of a comparison" in problem.detail


@pytest.mark.system
@pytest.mark.parametrize("reason", OFF)
def test_a_job_climbs_its_ladder_when_the_loss_is_off(world: World, reason: FailureReason) -> None:
    job_id, rank = world.start(precision=LADDER)
    rank.train(1, 2)
    rank.send(saved(2))
    for level, rest in (("O2", ("bf16-amp",)), ("bf16-amp", ())):
        rank.send(OFF[reason])
        job = world.job(job_id)
        assert (job.state, job.spec.precision.level, job.spec.precision.ladder) == (JobState.QUEUED, level, rest)
        assert job.num_failures == 0
        assert last_event(world, job_id) == (
            "job.queued",
            f"goes on at level {level}; it goes on after step 2, from its checkpoint",
            {"checkpoint_step": 2},
        )
        climbed = next(event for event in reversed(world.events(job_id)) if event.type == "job.climbed")
        assert climbed.data["level"] == level
        world.dispatch()
        world.dispatch()
        rank = world.rank_of(job_id)
        assert rank.order.spec.precision.level == level
        rank.begin(2)
    rank.send(OFF[reason])
    assert (world.job(job_id).state, world.job(job_id).reason) == (JobState.FAILED, reason)
    check_invariants(world)


@ON_SQLITE
def test_a_rung_without_fp8_has_no_limits_of_fp8(world: World) -> None:
    demotion = {"patience": 1, "max_layers": 0.5}
    job_id, rank = world.start(precision=LADDER | {"demotion": demotion})
    for level, limits in (("O2", 0.5), ("bf16-amp", None)):
        rank.send(OFF[FailureReason.FP8_LIMITS])
        found = world.job(job_id).spec.precision
        assert (found.level, found.demotion and found.demotion.max_layers) == (level, limits)
        world.dispatch()
        world.dispatch()
        rank = world.rank_of(job_id)
        rank.begin(0)


@ON_SQLITE
def test_another_failure_climbs_nothing(world: World) -> None:
    job_id = fail(world, precision=LADDER)
    assert world.job(job_id).spec.precision.level == "O3-split"


@ON_SQLITE
def test_a_job_that_is_being_paused_climbs_and_waits(world: World) -> None:
    job_id, rank = world.start(precision=LADDER)
    world.pause(job_id)
    rank.send(OFF[FailureReason.DIVERGED])
    job = world.job(job_id)
    assert (job.state, job.spec.precision.level) == (JobState.PAUSED, "O2")
