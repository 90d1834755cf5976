"""The checkpoints of a job that stay, by its spec: what is registered, and what lies on the disk."""

import os
from typing import Any

import pytest

from octet.api_schemas import CheckpointReport, EvaluationReport
from octet.api_schemas.training import KeepSpec
from octet.service import store
from tests.service.databases import ON_SQLITE
from tests.service.world import Rank, World, step


@pytest.mark.parametrize(
    ("keep", "losses", "surplus"),
    [
        ({}, {}, [10, 20, 30]),
        ({}, {20: 1.0, 30: 2.0}, [10, 30]),
        ({"last": 1, "best": 2}, {10: 3.0, 30: 2.0, 60: 1.0}, [10, 20, 40, 50]),
        ({"last": 1, "best": 0, "every": 20}, {10: 0.1}, [10, 30, 50]),
        ({"last": 9}, {}, []),
    ],
)
def test_what_no_field_keeps_is_surplus(keep: dict[str, Any], losses: dict[int, float], surplus: list[int]) -> None:
    assert KeepSpec(**keep).surplus([10, 20, 30, 40, 50, 60], losses) == surplus


def save(world: World, rank: Rank, number: int) -> None:
    """Write a checkpoint's folder, and report it with its step and evaluation. The first step has the best loss."""
    name = f"step_{number:010}"
    folder = world.settings.job_dir(rank.order.job_id) / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    os.utime(folder, (world.clock.now().timestamp(),) * 2)
    world.clock.turn(1)
    report = CheckpointReport(step=number, name=name, num_bytes=1, sha256="0" * 64, loss=1.0)
    rank.send(step(number), EvaluationReport(step=number, loss=1.0 + number, tokens=1), report)


def on_disk(world: World, job_id: str) -> list[int]:
    return sorted(int(path.name[5:]) for path in (world.settings.job_dir(job_id) / "checkpoints").iterdir())


def registered(world: World, job_id: str) -> list[int]:
    with world.database.read() as session:
        return [row.step for row in store.records.checkpoints_after(session, job_id, 0, 100)]


@ON_SQLITE
def test_a_new_checkpoint_removes_what_the_job_does_not_keep(world: World) -> None:
    job_id, rank = world.start(steps=8)
    for number in range(1, 7):
        save(world, rank, number)
    assert registered(world, job_id) == [1, 4, 5, 6], "the best, and the last three"
    assert world.events(job_id)[-1].message == "checkpoint of step 6 is complete; removed: 3"
    assert on_disk(world, job_id) == [1, 2, 3, 4, 5, 6]
    world.dispatch()
    world.tidy()
    assert on_disk(world, job_id) == [1, 4, 5, 6]


def test_files_that_are_not_reported_yet_or_written_again_stay(world: World) -> None:
    job_id, rank = world.start(steps=8)
    for number in range(1, 6):
        save(world, rank, number)
    folder = world.settings.job_dir(job_id) / "checkpoints"
    (folder / "step_0000000006").mkdir()  # complete, and its report is on its way
    later = world.clock.now().timestamp() + 1
    os.utime(folder / "step_0000000002", (later, later))  # written again by an attempt that had to go back
    world.dispatch()
    world.tidy()
    assert on_disk(world, job_id) == [1, 2, 3, 4, 5, 6]
    assert registered(world, job_id) == [1, 3, 4, 5]


@ON_SQLITE
def test_a_checkpoint_that_cannot_be_deleted_keeps_no_other_job_from_losing_its_own(world: World) -> None:
    jobs = {}
    for place in range(2):
        job_id, rank = jobs[place] = world.start(steps=8)
        for number in range(1, 7):
            save(world, rank, number)
        left = world.settings.job_dir(job_id) / "checkpoints" / "step_0000000000"
        if place:  # the newest job comes first
            left.symlink_to("nowhere")  # as if it was replaced just now
    world.dispatch()
    world.tidy()
    assert on_disk(world, jobs[0][0]) == [1, 4, 5, 6]
    left.unlink()
    left.write_text("no folder")
    os.utime(left, (0, 0))
    world.tidy()
    assert left.exists()
    left.unlink()
    world.tidy()
    assert on_disk(world, jobs[1][0]) == [1, 4, 5, 6]


@ON_SQLITE
def test_a_job_from_before_the_field_keeps_all(world: World) -> None:
    job_id, rank = world.start(steps=8)
    with world.database.write() as session:
        job = store.jobs.lock_job(session, job_id)
        assert job is not None
        training = {name: value for name, value in job.spec["training"].items() if name != "keep"}
        job.spec = job.spec | {"training": training}
    for number in range(1, 6):
        save(world, rank, number)
    assert registered(world, job_id) == [1, 2, 3, 4, 5]
