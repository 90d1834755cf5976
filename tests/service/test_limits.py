"""A job takes no more than it may: it saves a checkpoint and is cancelled, and goes on once its limit is higher."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octet.api_schemas import DesiredState, FailureReason, JobState, PoolConfig
from octet.service.app import create_app
from octet.service.errors import IllegalTransition
from octet.service.jobs.check_processes import CheckProcesses
from octet.service.jobs.limits import reached
from octet.service.settings import Settings
from octet.service.store.queue import Limits, Taken
from tests.service.conftest import TestClient
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
    assert (job.state, job.reason) == (JobState.CANCELLED, FailureReason.LIMIT_REACHED)
    assert job.hint is not None
    assert job.message == "it has taken 0.00611 of 0.00556 slot hours, its limit"
    with pytest.raises(IllegalTransition, match=r"resources\.max_slot_hours first"):
        world.retry(job_id)
    world.change(job_id, resources={"max_slot_hours": None})
    assert last_event(world, job_id)[1] == "changed: max_slot_hours is none"
    world.retry(job_id)
    assert (world.job(job_id).message, world.job(job_id).reason) == (None, None)
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


def reach_limit(world: World, job_id: str, allowed_s: float, over_s: float) -> None:
    """Run a job for seconds that its limit allows, and for those that are over it, until it has stopped."""
    world.dispatch()
    rank = world.rank_of(job_id)
    rank.begin()
    world.turn(allowed_s)
    world.dispatch()
    assert rank.train(1).desired is DesiredState.RUN
    world.turn(over_s)
    world.dispatch()
    assert rank.train(2).desired is DesiredState.CANCEL
    stop_at(rank, 2)


def test_a_limit_of_hours_counts_no_slots_and_no_waiting(world: World) -> None:
    job_id = world.submit(workers=2)
    world.change(job_id, resources={"max_hours": 20 / 3600})
    world.turn(1000)
    reach_limit(world, job_id, 15, 6)
    job = world.job(job_id)
    assert (job.reason, job.message) == (FailureReason.LIMIT_REACHED, "it has taken 0.00583 of 0.00556 hours, its limit")
    (event,) = [event for event in world.events(job_id) if event.type == "job.limit_reached"]
    assert event.data == {"hours": pytest.approx(21 / 3600), "max_hours": pytest.approx(20 / 3600)}
    with pytest.raises(IllegalTransition, match=r"resources\.max_hours first"):
        world.retry(job_id)


@ON_SQLITE
def test_a_job_that_ends_before_it_stops_at_its_limit_has_succeeded(world: World) -> None:
    job_id, rank = start(world, seconds=5)
    world.turn(6)
    world.dispatch()
    assert rank.train(1).desired is DesiredState.CANCEL
    rank.succeed()
    job = world.job(job_id)
    assert (job.state, job.reason, job.message) == (JobState.SUCCEEDED, None, None)


@ON_SQLITE
def test_a_limit_of_cost_is_of_the_pool_s_price(
    world: World, tmp_path: Path, spec_document: dict[str, Any], check_processes: CheckProcesses
) -> None:
    cheap, free = (PoolConfig(name=name, node_label=("octet-pool", name), slots=2) for name in ("cpu", "free"))
    settings = Settings(data_dir=tmp_path, pools=(cheap.model_copy(update={"slot_hour_price": 36.0}), free))
    world.settings = world.context.settings = settings
    app = create_app(settings, database=world.database, checks=check_processes)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:

        def ask(pool: str) -> Any:
            return client.post("/v1/jobs", json=spec_document | {"resources": {"pool": pool, "max_cost": 0.2}})

        refused = ask("free")
        (error,) = refused.json()["errors"]
        assert (refused.status_code, error["field"], error["got"]) == (422, "resources.max_cost", "0.2 in pool free")
        assert error["allowed"] == "a limit of cost in pools with slot_hour_price: cpu"
        job_id = ask("cpu").json()["id"]
        reach_limit(world, job_id, 19, 2)
        assert world.job(job_id).message == "it has taken 0.21 of 0.2 in cost, its limit"
        assert client.post(f"/v1/jobs/{job_id}/retry").status_code == 409
        assert client.patch(f"/v1/jobs/{job_id}", json={"resources": {"max_cost": 1}}).status_code == 200
        assert client.post(f"/v1/jobs/{job_id}/retry").status_code == 202
        elsewhere = client.post("/v1/jobs", json=spec_document | {"resources": {"pool": "free"}}).json()["id"]
        assert client.patch(f"/v1/jobs/{elsewhere}", json={"resources": {"max_cost": 1}}).status_code == 422


AMOUNTS = st.none() | st.floats(0.001, 1000)


@given(st.builds(Limits, AMOUNTS, AMOUNTS, AMOUNTS), st.floats(0, 2000), st.floats(0, 2000), st.none() | st.floats(0, 10))
def test_a_job_stops_exactly_when_it_has_taken_as_much_as_it_may(
    limits: Limits, slot_hours: float, hours: float, price: float | None
) -> None:
    found = reached(limits, Taken(slot_hours, hours), price)
    over = {
        "max_slot_hours": limits.max_slot_hours is not None and slot_hours >= limits.max_slot_hours,
        "max_hours": limits.max_hours is not None and hours >= limits.max_hours,
        "max_cost": limits.max_cost is not None and price is not None and slot_hours * price >= limits.max_cost,
    }
    assert (found is not None) == any(over.values())
    assert found is None or (over[found.field] and found.most == getattr(limits, found.field))
