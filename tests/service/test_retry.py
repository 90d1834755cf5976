"""Retry a job that is over, continue it with more steps, clone it, and change its priority and labels."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import AttemptState, DesiredState, ErrorCode, FailureReason, FinishedReport, JobSpec, JobState
from octet.service.db.tables import JobRow
from octet.service.errors import IllegalTransition
from octet.service.jobs.specs import merge_patch
from tests.service.databases import ON_SQLITE
from tests.service.invariants import check_invariants
from tests.service.test_jobs_api import problem_of
from tests.service.test_pause import last_event, saved
from tests.service.world import World

FAILED = FinishedReport(outcome="failed", reason=FailureReason.WORKER_ERROR, message="it broke")
UNKNOWN = "job_01kg9ys7g0zn9d2mqxrybeyjtc"
Document = dict[str, Any]


def fail(world: World, **changes: Any) -> str:
    """Let a job fail after it has saved step 2 and trained step 3."""
    job_id, rank = world.start(**changes)
    rank.train(1, 2)
    rank.send(saved(2))
    rank.train(3)
    rank.send(FAILED)
    assert world.job(job_id).state is JobState.FAILED
    return job_id


@ON_SQLITE
def test_a_failed_job_goes_on_from_its_checkpoint_as_the_same_job(world: World) -> None:
    job_id = fail(world)
    for _ in range(2):
        world.retry(job_id)
        job = world.job(job_id)
        assert (job.state, job.desired_state, job.num_failures) == (JobState.QUEUED, DesiredState.RUN, 0)
        assert (job.finished_at, job.reason, job.message, job.summary) == (None, None, None, None)
    assert last_event(world, job_id) == (
        "job.queued",
        "retried; it goes on after step 2, from its checkpoint",
        {"checkpoint_step": 2},
    )
    world.dispatch()
    world.dispatch()  # the processes of its first attempt have to be gone before the second is placed
    again = world.rank_of(job_id)
    assert [checkpoint.step for checkpoint in again.order.checkpoints] == [2]
    again.begin(2)
    again.train(3, 4)
    again.succeed()
    job = world.job(job_id)
    assert (job.state, job.num_attempts) == (JobState.SUCCEEDED, 2)
    assert [attempt.state for attempt in world.attempts(job_id)] == [AttemptState.FAILED, AttemptState.SUCCEEDED]
    check_invariants(world)


def test_a_cancelled_job_goes_on_too(world: World) -> None:
    job_id = world.submit()
    world.cancel(job_id)
    world.retry(job_id)
    assert last_event(world, job_id)[1] == "retried; it goes on at the beginning: it has no checkpoint"
    world.dispatch()
    assert world.job(job_id).state is JobState.STARTING


def test_a_retried_job_has_its_whole_budgets_again(world: World) -> None:
    job_id = fail(world)
    with world.database.write() as session:
        job = session.get_one(JobRow, job_id)
        job.failures = {"cluster_lost": 10}
    world.retry(job_id)
    world.dispatch()
    world.dispatch()
    rank = world.rank_of(job_id)
    rank.begin(2)
    rank.send(FinishedReport(outcome="failed", reason=FailureReason.CLUSTER_LOST))
    job = world.job(job_id)
    assert (job.state, job.num_failures) == (JobState.QUEUED, 1)


@ON_SQLITE
def test_what_is_live_stays_and_what_pauses_says_what_is_possible(world: World) -> None:
    job_id, _ = world.start()
    num_events = len(world.events(job_id))
    world.retry(job_id)
    assert (world.job(job_id).state, len(world.events(job_id))) == (JobState.RUNNING, num_events)
    with pytest.raises(IllegalTransition, match=r"running; retry with more steps is not possible\. Possible: pause, cancel"):
        world.retry(job_id, 8)
    world.pause(job_id)
    with pytest.raises(IllegalTransition, match=r"pausing; retry is not possible\. Possible: cancel"):
        world.retry(job_id)


def test_a_job_that_has_succeeded_goes_on_with_more_steps(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.train(1, 2, 3, 4)
    rank.send(saved(4))
    rank.succeed()
    problem = problem_of(client.post(f"/v1/jobs/{job_id}/retry"), 409)
    assert (problem.code, "Possible: retry with more steps, export." in problem.detail) == (ErrorCode.ILLEGAL_TRANSITION, True)
    problem = problem_of(client.post(f"/v1/jobs/{job_id}/retry?steps=4"), 422)
    assert (problem.errors[0].field, problem.errors[0].allowed) == ("steps", "more than 4")
    for _ in range(2):
        shown = client.post(f"/v1/jobs/{job_id}/retry?steps=6")
        assert (shown.status_code, shown.json()["state"], shown.json()["spec"]["training"]["steps"]) == (202, "queued", 6)
    assert shown.json() == client.get(f"/v1/jobs/{job_id}").json()
    assert last_event(world, job_id)[1] == "continued; it goes on after step 4, from its checkpoint, to step 6"
    world.dispatch()
    world.dispatch()
    again = world.rank_of(job_id)
    assert again.order.spec.training.steps == 6
    again.begin(4)
    again.train(5, 6)
    progress = client.get(f"/v1/jobs/{job_id}").json()["progress"]
    assert (progress["step"], progress["steps"]) == (6, 6)
    again.succeed()
    check_invariants(world)


@ON_SQLITE
def test_more_steps_have_to_fit_the_rest_of_the_job(client: TestClient, world: World) -> None:
    """An epoch's job gets steps in their place, and a schedule that does not fit them is refused."""
    training = {"steps": None, "epochs": 1.0, "global_batch_size": 4, "sequence_length": 32}
    job_id = world.submit(training=training)
    world.cancel(job_id)
    shown = client.post(f"/v1/jobs/{job_id}/retry?steps=6").json()["spec"]["training"]
    assert (shown["steps"], shown["epochs"]) == (6, None)
    other = world.submit()
    world.cancel(other)
    assert problem_of(client.post(f"/v1/jobs/{other}/retry?steps=0"), 422).errors[0].field == "steps"
    problem_of(client.post(f"/v1/jobs/{UNKNOWN}/retry?steps=6"), 404)


@ON_SQLITE
def test_a_clone_is_a_new_job_with_the_spec_and_its_changes(client: TestClient, world: World) -> None:
    source = fail(world, labels={"team": "research", "try": "1"}, priority=60)
    plain = client.post(f"/v1/jobs/{source}/clone")
    assert plain.status_code == 201
    assert plain.headers["location"] == f"/v1/jobs/{plain.json()['id']}"
    assert plain.json()["spec"] == client.get(f"/v1/jobs/{source}").json()["spec"]
    assert world.events(plain.json()["id"])[0].message == (f"accepted into pool 'cpu' with priority 60, as a clone of {source}")
    patch = {
        "name": "clone",
        "training": {"steps": 9},
        "labels": {"team": None, "try": "2"},
        "priority": None,
        "precision": "O3",
    }
    spec = client.post(f"/v1/jobs/{source}/clone", json=patch).json()["spec"]
    assert (spec["name"], spec["training"]["steps"], spec["labels"], spec["priority"]) == ("clone", 9, {"try": "2"}, 50)
    assert spec["precision"]["level"] == "O3"
    assert len(world.all_jobs()) == 3
    check_invariants(world)


@ON_SQLITE
def test_a_clone_that_cannot_run_is_refused_as_a_new_job_is(client: TestClient, world: World) -> None:
    source = world.submit()
    for patch, field in (
        ({"training": {"stepz": 9}}, "training.stepz"),
        ({"model": None}, "model"),
        ({"resources": {"pool": "gone"}}, "resources.pool"),
        ({"training": {"steps": 10**400}}, "training.steps"),
    ):
        assert problem_of(client.post(f"/v1/jobs/{source}/clone", json=patch), 422).errors[0].field == field
    for body in (b"[1]", b"nonsense"):
        answer = client.post(f"/v1/jobs/{source}/clone", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in {400, 422}
    problem_of(client.post(f"/v1/jobs/{UNKNOWN}/clone"), 404)
    assert len(world.all_jobs()) == 1


@ON_SQLITE
def test_a_clone_that_is_sent_again_is_the_same_job(client: TestClient, world: World) -> None:
    source, headers = world.submit(), {"Idempotency-Key": "one"}
    path = f"/v1/jobs/{source}/clone"
    first = client.post(path, json={"name": "a", "priority": 1}, headers=headers)
    again = client.post(path, json={"priority": 1, "name": "a"}, headers=headers)
    assert (again.json()["id"], again.headers["idempotent-replayed"]) == (first.json()["id"], "true")
    assert problem_of(client.post(path, json={}, headers=headers), 422).code is ErrorCode.IDEMPOTENCY_MISMATCH


def test_a_merge_patch_is_that_of_rfc_7396() -> None:
    """The cases of its appendix A, but for documents and patches that are no mappings."""
    for document, patch, expected in (
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ):
        assert merge_patch(document, patch) == expected


def test_priority_and_labels_change_while_a_job_waits_or_runs(client: TestClient, world: World) -> None:
    running, rank = world.start(workers=1)
    first, last = world.submit(workers=2, labels={"team": "a", "old": "x"}), world.submit(workers=2)
    path = f"/v1/jobs/{last}"
    assert client.get(path).json()["queue"]["position"] == 2
    for _ in range(2):
        shown = client.patch(path, json={"priority": 70, "labels": {"team": "research"}}).json()
        assert (shown["priority"], shown["labels"], shown["queue"]["position"]) == (70, {"team": "research"}, 1)
    assert shown == client.get(path).json()
    assert [event.type for event in world.events(last)] == ["job.accepted", "job.changed"]
    assert last_event(world, last)[1] == "changed: priority is 70, was 50, label team is 'research'"
    shown = client.patch(f"/v1/jobs/{first}", json={"labels": {"old": None, "team": "research"}}).json()
    assert (shown["labels"], shown["spec"]["labels"]) == ({"team": "research"}, {"team": "research"})
    for query, found in (("team:research", {first, last}), ("team:a", set()), ("old:x", set())):
        assert {job["id"] for job in client.get(f"/v1/jobs?label={query}").json()["data"]} == found
        assert client.get(f"/v1/rows?label={query}").json()["total"] == len(found)
    assert client.patch(f"/v1/jobs/{running}", json={"priority": 1}).json()["priority"] == 1
    rank.train(1, 2, 3, 4)
    rank.succeed()
    check_invariants(world)


@ON_SQLITE
def test_what_cannot_change_is_refused(client: TestClient, world: World) -> None:
    job_id, rank = world.start(labels={f"k{number}": "" for number in range(64)})
    path = f"/v1/jobs/{job_id}"
    for body, field in (
        ({"priority": 101}, "priority"),
        ({"name": "other"}, "name"),
        ({"labels": {"BAD KEY": "x"}}, "labels.BAD KEY.[key]"),
        ({"labels": {"one-more": "x"}}, "labels"),
    ):
        assert problem_of(client.patch(path, json=body), 422).errors[0].field == field
    problem_of(client.patch(f"/v1/jobs/{UNKNOWN}", json={"priority": 1}), 404)
    rank.send(FAILED)
    problem = problem_of(client.patch(path, json={"priority": 70}), 409)
    assert "the job is failed: its priority has no effect. Retry it first, or clone it." in problem.detail
    assert client.patch(path, json={"labels": {"k1": "after the end"}}).json()["labels"]["k1"] == "after the end"


def test_a_stored_spec_gets_no_defaults_of_today_when_it_changes(world: World) -> None:
    """A job from before `training.keep` keeps all its checkpoints, also after its labels have changed."""
    job_id = world.submit()
    with world.database.write() as session:
        job = session.get_one(JobRow, job_id)
        training = {name: value for name, value in job.spec["training"].items() if name != "keep"}
        job.spec = job.spec | {"training": training}
    world.change(job_id, priority=1, labels={"team": "research"})
    world.cancel(job_id)
    world.retry(job_id, steps=5)
    with world.database.read() as session:
        spec = session.get_one(JobRow, job_id).spec
    assert "keep" not in spec["training"]
    assert (spec["priority"], spec["labels"], spec["training"]["steps"]) == (1, {"team": "research"}, 5)
    JobSpec.read_stored(spec)
