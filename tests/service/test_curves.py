"""Curves that are stored in parts read as if each step had a row of its own, also those from before there were parts."""

import random
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from octet.service import store
from octet.service.db.tables import CurvePartRow, EvaluationRow, JobRow
from octet.service.store import curves
from octet.service.store.curves import Point
from tests.service.world import World

ATTEMPTS = ("att_1", "att_2")


def made(step: int, draw: random.Random, world: World) -> Point:
    """Draw what a step may report: exact moments, numbers of all sizes, losses that were not finite."""
    return Point(
        step=step,
        at=world.clock.now() + timedelta(microseconds=draw.randrange(10**12)),
        attempt_id=draw.choice(ATTEMPTS),
        loss=draw.choice([None, draw.uniform(0, 10), 5e-324]),
        gradient_norm=draw.choice([None, draw.uniform(0, 1e300)]),
        learning_rate=draw.random(),
        tokens=draw.randrange(2**53),
        step_time_s=draw.random(),
        data_wait_s=draw.random(),
    )


@dataclass
class Model:
    """A curve as a row for each step, which is what parts must look like."""

    points: dict[int, Point] = field(default_factory=dict)

    def put(self, points: list[Point]) -> None:
        self.points |= {point.step: point for point in points}

    def evaluate(self, step: int, loss: float | None, metrics: dict[str, float | None]) -> bool:
        if step in self.points:
            self.points[step] = self.points[step]._replace(evaluation_loss=loss, evaluation_metrics=metrics)
        return step in self.points

    def drop_after(self, step: int) -> None:
        self.points = {number: point for number, point in self.points.items() if number <= step}

    def after(self, step: int, limit: int) -> list[Point]:
        return [self.points[number] for number in sorted(self.points) if number > step][:limit]


@pytest.mark.parametrize("seed", range(3))
def test_parts_read_as_rows(world: World, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Any steps in any order, steps again, evaluations, resumed checkpoints: pages and last values are those of rows."""
    monkeypatch.setattr(curves, "MAX_STEPS_PER_PART", 5)
    draw, model, job_id, other_id = random.Random(seed), Model(), world.submit(), world.submit()
    with world.database.write() as session:
        store.curves.put_points(session, other_id, [made(3, draw, world)])
    for _ in range(40):
        with world.database.write() as session:
            change(session, job_id, model, draw, world)
        step, limit = draw.randrange(45), draw.choice([1, 2, 7, 100])
        with world.database.read() as session:
            assert store.curves.points_after(session, job_id, step, limit) == model.after(step, limit)
            check_last_values(session, job_id, model)
            check_parts(session, job_id)
            assert len(store.curves.points_after(session, other_id, 0, 10)) == 1


def change(session: Session, job_id: str, model: Model, draw: random.Random, world: World) -> None:
    """Change a curve and its model in the same way."""
    match draw.choice(["add", "add", "put", "evaluate", "evaluate", "drop"]):
        case "add":
            begin = max(model.points, default=0) + draw.choice([1, 1, 3])
            attempt_id = draw.choice(ATTEMPTS)
            points = [
                made(step, draw, world)._replace(attempt_id=attempt_id) for step in range(begin, begin + draw.randrange(1, 6))
            ]
            store.curves.add_parts(session, [curves.pack_curve(job_id, attempt_id, [point.at for point in points], points)])
            model.put(points)
        case "put":
            points = [made(draw.randrange(1, 40), draw, world) for _ in range(draw.randrange(12))]
            points = [
                point._replace(evaluation_loss=1.5, evaluation_metrics={"a": None}) if draw.random() < 0.2 else point
                for point in points
            ]
            store.curves.put_points(session, job_id, points)
            model.put(points)
        case "evaluate":
            step, loss = draw.randrange(1, 40), draw.choice([None, draw.random()])
            metrics: dict[str, float | None] = {"accuracy": draw.random()}
            assert store.curves.put_evaluation(session, job_id, step, loss, metrics) == model.evaluate(step, loss, metrics)
        case _:
            step = draw.randrange(40)
            store.curves.drop_after(session, job_id, step)
            model.drop_after(step)
    last = max(model.points, default=None)
    session.get_one(JobRow, job_id).step = last if draw.random() < 0.5 else draw.randrange(40)


def check_last_values(session: Session, job_id: str, model: Model) -> None:
    last, job = max(model.points, default=None), session.get_one(JobRow, job_id)
    assert store.curves.last_loss(session, job_id) == (None if last is None else model.points[last].loss)
    expected = model.points.get(-1 if job.step is None else job.step)
    without = expected and expected._replace(evaluation_loss=None, evaluation_metrics=None)
    assert store.curves.current_points(session, [job_id]).get(job_id) == without
    evaluated = [step for step, point in model.points.items() if point.evaluation_loss is not None]
    found = store.curves.last_evaluations(session, [job_id]).get(job_id)
    assert (found and found.step) == (max(evaluated) if evaluated else None)


def check_parts(session: Session, job_id: str) -> None:
    """Parts must not overlap, and there is nothing that belongs to no step."""
    of_job = select(CurvePartRow).where(CurvePartRow.job_id == job_id).order_by(CurvePartRow.last_step)
    parts = list(session.scalars(of_job))
    bounds = [bound for part in parts for bound in (part.first_step, part.last_step)]
    assert bounds == sorted(bounds)
    assert all(before.last_step < after.first_step for before, after in pairwise(parts))
    assert all(1 <= part.num_steps <= 5 for part in parts)
    steps = {point.step for point in store.curves.points_after(session, job_id, 0, 1000)}
    assert steps >= set(session.scalars(select(EvaluationRow.step).where(EvaluationRow.job_id == job_id)))
