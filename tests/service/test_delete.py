"""Delete a job: all rows at once, its folder by a loop that survives a kill, and nothing else."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from octet.api_schemas import ErrorCode, EvaluationReport, FinishedReport, LaunchOrder, LogReport
from octet.service import store
from octet.service.db.tables import AuditRow, Base, DeletedJobRow, ExportRow, IdempotencyKeyRow, LastStartRow, TallyRow
from octet.service.dispatcher import release, watch
from octet.service.errors import NotFound, Unauthenticated
from octet.service.http.streams import POLL_S, Streams, Subscription
from octet.service.jobs.requests import Request, Submission
from octet.service.routes.job_views import shown_submissions
from octet.service.routes.records import EVENTS
from octet.service.routes.stream import POINTS
from octet.service.store.curves import CurvePlace
from octet.service.store.ids import new_id
from tests.service.invariants import check_invariants
from tests.service.test_checkpoint_files import write_checkpoint
from tests.service.test_jobs_api import problem_of
from tests.service.world import Rank, World, step

Document = dict[str, Any]


def finish(world: World, **changes: Any) -> tuple[str, Rank]:
    """Let a job leave rows in every table and files in its folder, and let its processes end."""
    job_id, rank = world.start(labels={"team": "research"}, **changes)
    rank.send(step(1), EvaluationReport(step=1, loss=1.0, tokens=1), LogReport(level="INFO", message="half way"))
    rank.send(write_checkpoint(world, job_id))
    rank.send(FinishedReport(outcome="failed", message="it broke"))
    world.dispatch()
    return job_id, rank


def counts(world: World) -> dict[str, int]:
    """Count the rows of all tables that hold jobs and what belongs to them."""
    others = {row.__tablename__ for row in (TallyRow, DeletedJobRow, ExportRow, IdempotencyKeyRow, AuditRow, LastStartRow)}
    others |= {"leases", "pool_capacities", "deleted_uses"}
    with world.database.read() as session:
        return {
            table.name: session.scalar(select(func.count()).select_from(table)) or 0
            for table in Base.metadata.sorted_tables
            if table.name not in others
        }


def test_all_of_a_job_goes_and_nothing_of_others(client: TestClient, world: World) -> None:
    other, _ = finish(world, name="other")
    before = counts(world)
    job_id, _ = finish(world)
    added = {name for name, count in counts(world).items() if count > before[name]}
    assert added >= {"jobs", "job_labels", "attempts", "events", "checkpoints", "log_lines", "evaluations", "curve_parts"}
    folder, kept = (world.settings.job_dir(each) for each in (job_id, other))
    assert client.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert counts(world) == before
    for part in ("", "/events", "/logs", "/checkpoints", "/attempts", "/metrics"):
        problem_of(client.get(f"/v1/jobs/{job_id}{part}"), 404)
    for method, path in (("DELETE", ""), ("POST", "/retry"), ("POST", "/clone")):
        problem_of(client.request(method, f"/v1/jobs/{job_id}{path}"), 404)
    assert [job["id"] for job in client.get("/v1/jobs").json()["data"]] == [other]
    assert folder.exists()
    world.tidy()
    assert (folder.exists(), kept.exists()) == (False, True)
    check_invariants(world)


def test_a_job_that_is_not_over_or_has_processes_stays(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    paths = f"/v1/jobs/{job_id}", f"/v1/jobs/{world.submit()}"
    for path, state in zip(paths, ("running", "queued"), strict=True):
        problem = problem_of(client.delete(path), 409)
        assert problem.code is ErrorCode.ILLEGAL_TRANSITION
        assert f"the job is {state}; delete is not possible. Cancel it first." in problem.detail
    world.cancel(job_id)
    assert "the job is cancelling; delete is not possible. Try again once" in problem_of(client.delete(paths[0]), 409).detail
    rank.train(1, 2, 3, 4)
    rank.succeed()
    assert "its processes are being stopped. Try again in some seconds." in problem_of(client.delete(paths[0]), 409).detail
    world.dispatch()
    assert client.delete(paths[0]).status_code == 204


def test_the_folder_goes_though_the_dispatcher_is_killed_or_cannot_delete_it_yet(world: World) -> None:
    job_id, _ = finish(world)
    folder = world.settings.job_dir(job_id)
    world.delete(job_id)
    world.restart()  # the one that would have deleted the folder is gone
    moved = folder.rename(folder.with_name("aside"))
    folder.write_text("no folder")
    world.tidy()
    with world.database.read() as session:
        assert store.jobs.deleted_jobs(session, 10) == [job_id]
    folder.unlink()
    moved.rename(folder)
    world.tidy()
    assert not folder.exists()
    with world.database.read() as session:
        assert store.jobs.deleted_jobs(session, 10) == []


def test_the_counter_of_attempts_that_ended_does_not_fall(client: TestClient, world: World) -> None:
    """Prometheus takes a counter that falls for one that began again, and all of it for an increase: an alert would fire."""

    def ended() -> list[str]:
        return sorted(line for line in client.get("/metrics").text.splitlines() if line.startswith("octet_attempts_total"))

    deleted = [finish(world)[0] for _ in range(3)]
    before = ended()
    assert 'octet_attempts_total{outcome="failed",reason="worker_error"} 3.0' in before
    for job_id in deleted[:2]:
        world.delete(job_id)
    world.tidy()
    assert ended() == before
    world.delete(deleted[2])
    assert ended() == before
    check_invariants(world)


def test_the_folder_stays_while_a_process_may_write_into_it(world: World) -> None:
    job_id, rank = finish(world)
    folder = world.settings.job_dir(job_id)
    world.launcher.launch(rank.order)  # an orphan
    world.launcher.reachable = False
    world.delete(job_id)
    world.tidy()
    assert folder.exists()
    world.launcher.reachable = True
    world.tidy()
    assert (folder.exists(), world.launcher.is_running(rank.ref)) == (False, False)


def test_a_launch_that_ends_after_the_job_was_deleted_leaves_no_folder(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, launch = world.submit(), world.launcher.launch
    folder = world.settings.job_dir(job_id)

    def launch_late(order: LaunchOrder) -> None:
        world.cancel(job_id)
        world.turn(world.settings.launch_timeout_s + 1)
        watch.step(world.context)
        release.step(world.context)
        world.delete(job_id)
        world.tidy()
        launch(order)
        folder.mkdir(parents=True)  # by its rank

    monkeypatch.setattr(world.launcher, "launch", launch_late)
    world.dispatch()
    assert len(world.launcher.orders) == 1
    world.tidy()
    assert (folder.exists(), len(world.launcher.orders)) == (False, 0)


def test_a_stream_of_a_curve_that_is_deleted_as_it_is_opened_goes_on_without_it(world: World) -> None:
    gone = world.submit()
    world.cancel(gone)
    world.delete(gone)
    other, _ = world.start()

    async def read() -> list[str]:
        ours = Streams(world.database)
        start = CurvePlace(0, 0, 0)
        parts: Any = ours.open_many([Subscription(POINTS, gone, start), Subscription(EVENTS, other, 0)], []).body_iterator
        found = [await anext(parts), await anext(parts)]
        waiting = asyncio.create_task(anext(parts))
        await asyncio.sleep(3 * POLL_S)
        assert not waiting.done(), "it has looked, and waits for more"
        waiting.cancel()
        await asyncio.wait([waiting])
        await parts.aclose()
        alone: Any = ours.open(gone, POINTS, start).body_iterator
        assert [part async for part in alone] == [": here\n\n"]
        await ours.close()
        return found

    assert "event: event" in asyncio.run(read())[1]


def test_a_submission_whose_job_is_deleted_before_it_is_shown_says_so(world: World, client: TestClient) -> None:
    job_id, context = world.submit(), cast(FastAPI, client.app).state.context
    world.cancel(job_id)
    with world.database.write() as session:
        job = store.jobs.lock_job(session, job_id)
        assert job is not None
        store.jobs.delete_job(session, job, world.clock.now())
        with pytest.raises(NotFound, match=f"there is no job {job_id} any more"):
            shown_submissions(session, context, [(Request(world.spec, "key"), Submission(job, replayed=True))])


def test_a_late_report_and_a_late_submission_do_not_bring_it_back(
    client: TestClient, world: World, spec_document: Document
) -> None:
    headers = {"Idempotency-Key": "one"}
    job_id = client.post("/v1/jobs", json=spec_document, headers=headers).json()["id"]
    world.dispatch()
    rank = world.rank_of(job_id)
    rank.begin()
    rank.train(1, 2, 3, 4)
    rank.succeed()
    world.dispatch()
    client.delete(f"/v1/jobs/{job_id}")
    with pytest.raises(Unauthenticated, match="end this process"):
        rank.send(LogReport(level="INFO", message="late"))
    problem = problem_of(client.post("/v1/jobs", json=spec_document, headers=headers), 422)
    assert (problem.code, f"{job_id}, which is deleted" in problem.detail) == (ErrorCode.IDEMPOTENCY_MISMATCH, True)
    assert world.all_jobs() == []


def test_a_list_is_counted_again_after_one_job_went_and_another_came(client: TestClient, world: World) -> None:
    path = "/v1/rows?limit=1&q=small"
    first = world.submit(name="small")
    world.cancel(first)
    assert client.get(path).json()["total"] == 1
    world.delete(first)
    world.submit(name="another")
    assert client.get(path).json()["total"] == 0


def steps_in(client: TestClient, job_id: str, kind: str = "checkpoints") -> dict[int, str]:
    """The ids of a job's checkpoints or exports, by step."""
    return {each["step"]: each["id"] for each in client.get(f"/v1/jobs/{job_id}/{kind}").json()["data"]}


def saved_twice(world: World) -> tuple[str, Path]:
    """A job that has failed after two checkpoints, and the folder of the first."""
    job_id, rank = world.start()
    for number in (1, 2):
        rank.send(step(number), write_checkpoint(world, job_id, number))
    rank.send(FinishedReport(outcome="failed", message="it broke"))
    world.dispatch()
    return job_id, world.settings.job_dir(job_id) / "checkpoints" / "step_0000000001"


def test_a_checkpoint_goes_with_its_files_and_the_others_stay(client: TestClient, world: World) -> None:
    job_id, folder = saved_twice(world)
    assert client.delete(f"/v1/jobs/{job_id}/checkpoints/{folder.name}").status_code == 204
    assert [*steps_in(client, job_id)] == [2]
    problem_of(client.get(f"/v1/jobs/{job_id}/checkpoints/{folder.name}/files"), 404)
    problem_of(client.delete(f"/v1/jobs/{job_id}/checkpoints/{folder.name}"), 404)
    (event,) = [event for event in world.events(job_id) if event.type == "checkpoint.deleted"]
    assert (event.data["step"], event.data["name"]) == (1, folder.name)
    assert folder.exists()
    world.tidy()
    assert (folder.exists(), folder.with_name("step_0000000002").exists()) == (False, True)
    check_invariants(world)


def test_the_last_checkpoint_of_a_job_that_ended_long_ago_goes_too(client: TestClient, world: World) -> None:
    job_id, folder = saved_twice(world)
    world.turn(7 * 24 * 3600)
    for checkpoint_id in steps_in(client, job_id).values():
        assert client.delete(f"/v1/jobs/{job_id}/checkpoints/{checkpoint_id}").status_code == 204
    world.tidy()
    assert (steps_in(client, job_id), list(folder.parent.iterdir())) == ({}, [])


def test_a_kill_between_the_row_and_the_files_leaves_neither(client: TestClient, world: World) -> None:
    """No attempt begins in between: it could find half of a checkpoint, or report an export whose files go."""
    job_id, folder = saved_twice(world)
    assert client.delete(f"/v1/jobs/{job_id}/checkpoints/{folder.name}").status_code == 204
    world.restart()
    assert "Try again in a minute." in problem_of(client.post(f"/v1/jobs/{job_id}/retry"), 409).detail
    moved = folder.rename(folder.with_name("aside"))
    folder.write_text("no folder")
    world.tidy()
    assert client.post(f"/v1/jobs/{job_id}/retry").status_code == 409
    folder.unlink()
    moved.rename(folder)
    world.tidy()
    assert not folder.exists()
    assert client.post(f"/v1/jobs/{job_id}/retry").status_code == 202


def test_checkpoints_of_a_job_that_lives_stay(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.send(step(1), write_checkpoint(world, job_id, 1))
    path = f"/v1/jobs/{job_id}/checkpoints/step_0000000001"
    assert "the job is running; delete is not possible. Cancel it first." in problem_of(client.delete(path), 409).detail
    problem_of(client.delete(f"/v1/jobs/{job_id}/checkpoints/step_0000000009"), 404)
    assert [*steps_in(client, job_id)] == [1]


def test_an_export_goes_with_its_files(client: TestClient, world: World) -> None:
    job_id, _ = saved_twice(world)
    folder = world.settings.job_dir(job_id) / "exports" / "step_0000000002_bf16"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    with world.database.write() as session:
        made = {"id": new_id("exp", world.clock.now()), "job_id": job_id, "attempt_id": "att_1", "name": folder.name, "step": 2}
        form = {"format": "bf16", "layout": "compressed-tensors", "activations": "none", "num_bytes": 7, "sha256": "a" * 64}
        session.add(ExportRow(**made, **form, created_at=world.clock.now()))
    assert client.delete(f"/v1/jobs/{job_id}/exports/{made['id']}").status_code == 204
    world.tidy()
    assert (steps_in(client, job_id, "exports"), folder.exists()) == ({}, False)
    assert [*steps_in(client, job_id)] == [1, 2]
