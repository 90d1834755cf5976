"""`GET /v1/jobs/{id}/measurements`: what rank 0 measured is there while the job runs."""

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import FailureReason, FinishedReport, MeasuredReport
from octet.api_schemas.measured import LayerHealth, Measurements, MemoryBytes
from octet.service.errors import InvalidRequest
from octet.service.store.records import COUNTS
from tests.service.databases import ON_SQLITE
from tests.service.world import World, step

MEMORY = MemoryBytes(held={"weights": 10, "exp_avg": 5}, fp32={"weights": 40, "exp_avg": 20}, host=0, peak=None)
LAYERS = tuple(
    LayerHealth(
        layer=f"h.{number}",
        operand="grad_output",
        step=3,
        amax=1.0,
        dequant_scale=0.5,
        overflow_ratio=0.0,
        underflow_ratio=0.1,
        sqnr_db=20.0 + number,
    )
    for number in range(10)
)


def measurements(client: TestClient, job_id: str) -> Measurements:
    answer = client.get(f"/v1/jobs/{job_id}/measurements")
    assert answer.status_code == 200, answer.text
    return Measurements.model_validate_json(answer.content)


def test_measurements_are_shown_while_the_job_runs_and_after_it(client: TestClient, world: World) -> None:
    job_id = world.submit(max_failures=1)
    assert client.get(f"/v1/jobs/{job_id}/measurements").status_code == 404
    world.dispatch()
    rank = world.rank_of(job_id)
    rank.begin()
    assert world.events(job_id)[-1].data == dict.fromkeys(COUNTS[1:], 0) | {"num_parameters": 1000}
    shown = measurements(client, job_id)
    assert (shown.num_parameters, shown.memory, shown.layers, shown.step) == (1000, None, None, 0)
    rank.send(MeasuredReport(step=1, memory=MEMORY), step(1))
    rank.send(MeasuredReport(step=3, layers=LAYERS))
    shown = measurements(client, job_id)
    assert (shown.step, shown.memory, shown.layers, shown.attempt_id) == (3, MEMORY, LAYERS, rank.order.attempt_id)
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.WORKER_LOST, message="gone"))
    world.dispatch()
    world.turn(10)
    world.dispatch()
    again = world.rank_of(job_id)
    again.begin(resumed_from_step=1)
    shown = measurements(client, job_id)
    assert (shown.step, shown.memory, shown.layers, shown.attempt_id) == (1, MEMORY, LAYERS, again.order.attempt_id)
    again.succeed()
    assert measurements(client, job_id) == shown


@ON_SQLITE
def test_a_rank_measures_only_while_it_trains(world: World) -> None:
    job_id = world.submit()
    world.dispatch()
    with pytest.raises(InvalidRequest, match="'measured' report before 'started'"):
        world.rank_of(job_id).send(MeasuredReport(step=1))
