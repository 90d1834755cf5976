"""`GET /v1/jobs/{id}/curve`: a curve of any length in 150 KB, without the loss of a spike."""

import math
import random
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from octet.api_schemas import EvaluationReport, StepReport
from octet.api_schemas.curve import Curve
from octet.service import store
from octet.service.jobs.curve import buckets_of, columns_of, width_for
from octet.service.store.curves import Columns, Point, pack_curve
from tests.service.databases import ON_SQLITE
from tests.service.world import World, step


def curve_of(client: TestClient, job_id: str, query: str = "") -> dict[str, Any]:
    answer = client.get(f"/v1/jobs/{job_id}/curve{query}")
    assert answer.status_code == 200, answer.text
    assert Curve.model_validate_json(answer.text).model_dump_json() == answer.text
    found: dict[str, Any] = answer.json()
    return found


def train(world: World, job_id: str, losses: list[float | None], attempt_id: str = "att_1") -> None:
    """Write a curve as reports of 20 steps each do."""
    now = world.clock.now()
    points = [
        Point(number, now, attempt_id, loss, loss, 3.14159e-4, 123_456, 0.123456789, 0.000123456)
        for number, loss in enumerate(losses, start=1)
    ]
    with world.database.write() as session:
        parts = [points[begin : begin + 20] for begin in range(0, len(points), 20)]
        store.curves.add_parts(session, [pack_curve(job_id, attempt_id, [now] * len(part), part) for part in parts])


@ON_SQLITE
def test_a_short_curve_is_there_step_by_step(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.train(1, 2, 3)
    rank.send(EvaluationReport(step=2, loss=2.5, tokens=8, metrics={"accuracy": 0.5}))
    shown = curve_of(client, job_id)
    assert shown["step"] == [1, 2, 3]
    assert shown["loss"] == shown["loss_least"] == shown["loss_greatest"] == [5.0, 2.5, 1.66667]
    assert (shown["step_by"], shown["first_step"], shown["last_step"], shown["has_more"]) == (1, 1, 3, False)
    assert (shown["tokens"], shown["step_time_s"], shown["num_steps"]) == ([128] * 3, [0.5] * 3, [1] * 3)
    assert shown["at"] == [world.clock.now().timestamp()] * 3
    assert shown["evaluations"] == {
        "step": [2],
        "loss": [2.5],
        "loss_least": [2.5],
        "loss_greatest": [2.5],
        "metrics": {"accuracy": [0.5]},
    }
    assert shown["cursor"] == f"points.{job_id}.1.3.2"


def test_a_curve_without_steps_is_empty(client: TestClient, world: World) -> None:
    shown = curve_of(client, world.submit())
    assert (shown["step"], shown["last_step"], shown["has_more"]) == ([], None, False)


@pytest.mark.system
@ON_SQLITE
def test_100_000_steps_with_a_spike_take_150_kb(client: TestClient, world: World) -> None:
    job_id, draw = world.submit(), random.Random(1)
    losses: list[float | None] = [3 + draw.random() / 7 for _ in range(100_000)]
    losses[54_320], losses[77_777], losses[5] = 98.7654, 0.00123456, None
    train(world, job_id, losses)
    with world.database.write() as session:
        for number in range(100, 100_001, 100):
            store.curves.put_evaluation(session, job_id, number, 1 / number, {"accuracy": 0.123456})
    answer = client.get(f"/v1/jobs/{job_id}/curve?points=800", headers={"Accept-Encoding": "identity"})
    assert len(answer.content) <= 150_000
    shown = answer.json()
    assert len(shown["step"]) <= 800
    assert sum(shown["num_steps"]) == 100_000
    assert sum(shown["num_not_finite"]) == 1
    assert (max(shown["loss_greatest"]), min(shown["loss_least"])) == (98.7654, 0.00123456)
    assert sum(shown["tokens"]) == 100_000 * 123_456
    assert shown["evaluations"]["step"][-1] == 100_000
    assert len(shown["evaluations"]["step"]) <= 800
    small = client.get(f"/v1/jobs/{job_id}/curve", headers={"Accept-Encoding": "gzip"})
    assert small.headers["content-encoding"] == "gzip"
    assert max(small.json()["loss_greatest"]) == 98.7654


@ON_SQLITE
def test_every_step_comes_in_parts_with_step_by_1(client: TestClient, world: World) -> None:
    job_id, losses = world.submit(), [float(number) for number in range(1, 251)]
    train(world, job_id, [*losses])
    found, after = list[float](), 0
    while True:
        part = curve_of(client, job_id, f"?step_by=1&points=100&after={after}")
        found += part["loss"]
        after = part["step"][-1]
        assert part["cursor"].split(".")[3] == str(after)
        if not part["has_more"]:
            break
    assert found == losses


@settings(max_examples=60, deadline=None)
@given(
    num_steps=st.integers(1, 400), points=st.integers(2, 50), after=st.integers(0, 420), width=st.none() | st.integers(1, 60)
)
def test_buckets_hold_each_step_once(num_steps: int, points: int, after: int, width: int | None) -> None:
    """The least, the greatest and the mean of a bucket are those of its steps, whatever parts they are stored in."""
    draw = random.Random(num_steps)
    losses = [math.nan if draw.random() < 0.1 else draw.uniform(-5, 5) for _ in range(num_steps)]
    of_range = list(range(after + 1, num_steps + 1))
    step_by = width or width_for(max(0, num_steps - after), points)
    parts, begin = [], after
    while begin < num_steps:
        end = min(num_steps, begin + draw.randrange(1, 30))
        steps, values = list(range(begin + 1, end + 1)), losses[begin:end]
        parts.append(Columns(steps, steps, steps, values, values, values, values, values))
        begin = end
    shown = columns_of(list(buckets_of(parts, step_by)))
    numbers = {(one - 1) // step_by for one in of_range}
    groups = {number: [one for one in of_range if (one - 1) // step_by == number] for number in numbers}
    assert list(shown["step"]) == [group[-1] for _, group in sorted(groups.items())]
    if width is None:
        assert len(groups) <= points
    for (_, group), least, greatest, count in zip(
        sorted(groups.items()), shown["loss_least"], shown["loss_greatest"], shown["num_not_finite"], strict=True
    ):
        finite = [losses[one - 1] for one in group if not math.isnan(losses[one - 1])]
        assert count == len(group) - len(finite)
        if finite:
            assert least == pytest.approx(min(finite), rel=1e-5)
            assert greatest == pytest.approx(max(finite), rel=1e-5)
        else:
            assert least is None


@ON_SQLITE
def test_a_resumed_attempt_begins_its_part_again(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.train(1, 2, 3, 4)
    with world.database.write() as session:
        store.records.drop_after(session, job_id, 2)
    assert curve_of(client, job_id)["step"] == [1, 2]


@ON_SQLITE
def test_wrong_questions_are_refused(client: TestClient, world: World) -> None:
    job_id = world.submit()
    for query in ("?points=1", "?points=801", "?step_by=0", "?points=10001&step_by=1", "?after=-1", "?until=3"):
        assert client.get(f"/v1/jobs/{job_id}/curve{query}").status_code == 422, query
    assert client.get("/v1/jobs/job_01kg9ys7g0zcz3435ebr0e41d0/curve").status_code == 404
    assert client.get(f"/v1/jobs/{job_id}/curve?points=10000&step_by=1").status_code == 200


@ON_SQLITE
def test_a_loss_that_is_not_finite_is_counted(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    lost = StepReport(step=2, loss=None, gradient_norm=None, learning_rate=0.1, tokens=1, step_time_s=0.1, data_wait_s=0.0)
    rank.send(step(1), lost)
    shown = curve_of(client, job_id, "?step_by=2&points=2")
    assert (shown["loss"], shown["num_not_finite"], shown["gradient_norm"]) == ([5.0], [1], [1.0])
