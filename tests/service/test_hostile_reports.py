"""Hostile reports from a rank that runs a user's code: they are refused, or every page that shows them still loads."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.service.databases import ON_SQLITE
from tests.service.world import Rank, World

NOW = "2026-11-23T00:00:00Z"
DIGITS = "9" * 10_000
STEP = {
    "kind": "step",
    "step": 1,
    "loss": 1.0,
    "gradient_norm": 1.0,
    "learning_rate": 0.1,
    "tokens": 10,
    "step_time_s": 0.1,
    "data_wait_s": 0.0,
}
READS = ("", "/events", "/logs", "/metrics", "/checkpoints", "/attempts")


def raw(**fields: str) -> str:
    """Return a step whose fields have these texts instead of their values."""
    return "{" + ",".join(f'"{name}":{fields.get(name, json.dumps(value))}' for name, value in STEP.items()) + "}"


def event(value: str) -> str:
    """Return an event whose data has this text as a value."""
    return f'{{"kind":"event","type":"a.b","message":"","data":{{"a":{value}}}}}'


def post(client: TestClient, rank: Rank, bodies: list[str], at: str = NOW, epoch: str = "1") -> int:
    """Send bodies as they are. Returns the answer's status."""
    reports = [f'{{"seq":{rank.seq + place},"at":"{at}","body":{body}}}' for place, body in enumerate(bodies, start=1)]
    text = f'{{"epoch":{epoch},"rank":0,"reports":[{",".join(reports)}]}}'
    headers = {"Authorization": f"Bearer {rank.order.token}", "Content-Type": "application/json"}
    status = client.post(f"/internal/v1/attempts/{rank.order.attempt_id}/reports", content=text, headers=headers).status_code
    rank.seq += len(bodies) if status == 200 else 0
    return status


HOSTILE = {
    "a loss that is not a number": [raw(loss="NaN")],
    "a loss beyond floats": [raw(loss="1e400")],
    "a loss of many digits": [raw(loss=DIGITS)],
    "steps of no time": [raw(step_time_s="5e-324", tokens=str(2**53))],
    "steps of endless time": [raw(step_time_s="1.7e308")],
    "steps of less than no time": [raw(step_time_s="-1.7e308", data_wait_s="-1e300")],
    "numbers at their ends": [raw(loss="1.7e308", gradient_norm="-1.7e308", learning_rate="-5e-324", step=str(2**53))],
    "a step with a key twice": [raw()[:-1] + ',"step":2}'],
    "steps that go back": [raw(step="4"), raw(step="1"), raw(step="4")],
    "an integer of many digits": [event(DIGITS)],
    "a large integer": [event(DIGITS[:4299])],
    "an event's data that is no number": [event("NaN")],
    "an event's data beyond floats": [event("1e400"), event("-1e400")],
    "half a surrogate pair": ['{"kind":"log","level":"\\ud800","message":"\\udfff"}'],
    "control characters": ['{"kind":"log","level":"\\u001b[31m","message":"\\u0000\\u001b]0;a\\u0007\\r\\n\\u2028"}'],
    "deep data": [event("[" * 50_000 + "]" * 50_000)],
    "an evaluation at no number": ['{"kind":"evaluation","step":1,"loss":1.7e308,"tokens":0,"metrics":{"a":-1.7e308}}'],
    "a result beyond floats": [
        f'{{"kind":"finished","outcome":"succeeded","summary":{{"steps":{DIGITS},"final_loss":1e400,"evaluation_loss":NaN}}}}'
    ],
}


STORED = ("numbers at their ends", "a large integer", "half a surrogate pair", "control characters")
"""Values that a database stores or refuses in its own way. All else is refused or read before."""
CASES = [
    *(pytest.param(bodies, "sqlite", id=f"{name}-sqlite") for name, bodies in HOSTILE.items()),
    *(
        pytest.param(
            bodies,
            "postgres",
            id=f"{name}-postgres",
            marks=(pytest.mark.postgres, pytest.mark.system if name in STORED else pytest.mark.matrix),
        )
        for name, bodies in HOSTILE.items()
    ),
]


@pytest.mark.system
@pytest.mark.parametrize(("bodies", "database_url"), CASES, indirect=["database_url"])
def test_all_can_be_read_whatever_a_rank_reports(client: TestClient, world: World, bodies: list[str]) -> None:
    job_id, rank = world.start()
    assert post(client, rank, bodies) in {200, 400, 422}
    assert_all_is_read(client, job_id)
    assert post(client, rank, [raw(step=str(2))]) == 200, "the rank goes on"
    assert_all_is_read(client, job_id)


@pytest.mark.system
@ON_SQLITE
@pytest.mark.parametrize("at", ["9999-12-31T23:59:59.999999Z", "0001-01-01T00:00:00Z", "1969-12-31T23:59:59Z"])
def test_moments_far_away_can_be_read(client: TestClient, world: World, at: str) -> None:
    job_id = world.submit()
    world.dispatch()
    rank = world.rank_of(job_id)
    for phase in ("placed", "torch_imported", "process_up"):
        assert post(client, rank, [f'{{"kind":"phase","phase":"{phase}"}}'], at) == 200
    rank.begin()
    checkpoint = {"kind": "checkpoint", "step": 1, "name": "step_0000000001", "num_bytes": 1, "sha256": "0" * 64, "loss": None}
    bodies = [raw(), json.dumps(checkpoint), '{"kind":"log","level":"INFO","message":"a"}']
    assert post(client, rank, bodies, at) == 200
    assert_all_is_read(client, job_id)
    rank.succeed()
    assert_all_is_read(client, job_id)
    assert all(0 <= seconds < 60 for seconds in phases(client)), "no report changes what was measured by more than it took"


@ON_SQLITE
@pytest.mark.parametrize("epoch", ["0", "-1", DIGITS, "1e400", str(2**70), "null"])
def test_an_epoch_that_cannot_be_is_refused(client: TestClient, world: World, epoch: str) -> None:
    _, rank = world.start()
    assert post(client, rank, [raw()], epoch=epoch) in {400, 409, 422}


def assert_all_is_read(client: TestClient, job_id: str) -> None:
    paths = [f"/v1/jobs/{job_id}{read}" for read in READS] + ["/v1/jobs", "/v1/jobs?limit=1", "/metrics"]
    statuses = {path: client.get(path).status_code for path in paths}
    assert set(statuses.values()) == {200}, statuses


def phases(client: TestClient) -> list[Any]:
    lines = client.get("/metrics").text.splitlines()
    found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("octet_job_start_overhead_seconds_sum")]
    assert found
    return found
