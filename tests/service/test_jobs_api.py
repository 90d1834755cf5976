"""The API of jobs: submit once, list in pages, cancel, and refuse with the field to change."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from octet.api_schemas import ErrorCode, Job, JobSpec, JobState, Page, Problem, ValidatedJob
from octet.service import store
from octet.service.app import create_app
from octet.service.db.tables import IdempotencyKeyRow, JobRow
from octet.service.settings import Settings
from tests.service.databases import ON_SQLITE
from tests.service.world import World

Document = dict[str, Any]


def problem_of(response: Any, status: int) -> Problem:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = Problem.model_validate_json(response.content)
    assert problem.status == status
    assert "Traceback" not in response.text
    return problem


@ON_SQLITE
def test_submit_stores_the_job_and_says_where(client: TestClient, world: World, spec_document: Document) -> None:
    response = client.post("/v1/jobs", json=spec_document)
    assert response.status_code == 201
    job = Job.model_validate_json(response.content)
    assert response.headers["location"] == f"/v1/jobs/{job.id}"
    assert job.state is JobState.QUEUED
    assert job.queue is not None
    assert job.queue.position == 1
    assert client.get(response.headers["location"]).json() == response.json()
    assert world.events(job.id)[0].type == "job.accepted"


@ON_SQLITE
def test_the_same_key_and_body_give_the_same_job(client: TestClient, world: World, spec_document: Document) -> None:
    headers = {"Idempotency-Key": "one"}
    first = client.post("/v1/jobs", json=spec_document, headers=headers)
    again = client.post("/v1/jobs", json=spec_document, headers=headers)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json()["id"] == first.json()["id"]
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert len(world.all_jobs()) == 1


@ON_SQLITE
def test_the_same_key_for_another_body_is_refused(client: TestClient, spec_document: Document) -> None:
    headers = {"Idempotency-Key": "one"}
    client.post("/v1/jobs", json=spec_document, headers=headers)
    problem = problem_of(client.post("/v1/jobs", json=spec_document | {"priority": 1}, headers=headers), 422)
    assert problem.code is ErrorCode.IDEMPOTENCY_MISMATCH


@ON_SQLITE
def test_what_was_sent_is_compared_and_not_the_order_of_its_keys(client: TestClient, spec_document: Document) -> None:
    headers = {"Idempotency-Key": "one"}
    first = client.post("/v1/jobs", json=spec_document, headers=headers)
    turned = {name: dict(reversed(each.items())) if isinstance(each, dict) else each for name, each in spec_document.items()}
    for body in (dict(reversed(turned.items())), first.json()["spec"]):
        again = client.post("/v1/jobs", json=body, headers=headers)
        assert (again.json()["id"], again.headers["idempotent-replayed"]) == (first.json()["id"], "true")


def test_a_retry_after_an_upgrade_is_a_replay(client: TestClient, world: World, spec_document: Document) -> None:
    """Neither another default of today nor the hash of an older version makes it another job."""
    headers = {"Idempotency-Key": "one"}
    first = client.post("/v1/jobs", json=spec_document, headers=headers).json()
    with world.database.write() as session:
        job = session.get_one(JobRow, first["id"])
        job.spec = job.spec | {"priority": 49}  # as if 49 had been the default then
    again = client.post("/v1/jobs", json=spec_document, headers=headers).json()
    assert (again["id"], again["spec"]["priority"]) == (first["id"], 49)
    with world.database.write() as session:
        session.get_one(JobRow, first["id"]).spec = first["spec"]
        (key,) = session.scalars(select(IdempotencyKeyRow))
        key.body_hash = "of the spec with its defaults, as it was made before"
    assert client.post("/v1/jobs", json=spec_document, headers=headers).json()["id"] == first["id"]
    problem_of(client.post("/v1/jobs", json=spec_document | {"priority": 1}, headers=headers), 422)


@ON_SQLITE
def test_a_key_is_forgotten_after_a_day(client: TestClient, world: World, spec_document: Document) -> None:
    headers = {"Idempotency-Key": "one"}
    client.post("/v1/jobs", json=spec_document, headers=headers)
    world.clock.turn(24 * 3600 + 1)
    assert client.post("/v1/jobs", json=spec_document | {"priority": 1}, headers=headers).status_code == 201


@ON_SQLITE
def test_a_replay_needs_no_data_any_more(client: TestClient, spec_document: Document, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("short_lived")
    for number in range(2):
        (folder / f"{number}.txt").write_text("some text\n" * 100)
    spec = spec_document | {"data": {"path": str(folder)}}
    first = client.post("/v1/jobs", json=spec, headers={"Idempotency-Key": "one"})
    (folder / "0.txt").unlink()
    again = client.post("/v1/jobs", json=spec, headers={"Idempotency-Key": "one"})
    assert again.json()["id"] == first.json()["id"]


@ON_SQLITE
def test_requests_with_one_key_at_once_make_one_job(client: TestClient, world: World, spec_document: Document) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(
            threads.map(lambda _: client.post("/v1/jobs", json=spec_document, headers={"Idempotency-Key": "one"}), range(16))
        )
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len([answer for answer in answers if "idempotent-replayed" not in answer.headers]) == 1
    assert len(world.all_jobs()) == 1


@ON_SQLITE
def test_a_key_that_cannot_be_is_refused(client: TestClient, spec_document: Document) -> None:
    for key in ("", " ", "a b", "x" * 256):
        problem_of(client.post("/v1/jobs", json=spec_document, headers={"Idempotency-Key": key}), 422)


@ON_SQLITE
def test_validate_says_what_the_job_would_run_as_and_stores_nothing(
    client: TestClient, world: World, spec_document: Document
) -> None:
    response = client.post("/v1/jobs/validate", json=spec_document)
    validated = ValidatedJob.model_validate_json(response.content)
    assert validated.num_parameters == validated.sizes.num_parameters > 0
    assert validated.tokens_per_step == 4 * 32
    assert validated.gradient_accumulation == "fp32"  # what level fp32 stores
    assert validated.spec.training.optimizer.name == "adamw"
    assert world.all_jobs() == []


BAD_SPECS: list[tuple[Document, str, str]] = [
    ({"precision": {"level": "02"}}, "precision.level", "with the letter O"),
    ({"precision": {"level": "bf61-amp"}}, "precision.level", "Did you mean 'bf16-amp'?"),
    ({"modle": {}}, "modle", "Did you mean 'model'?"),
    ({"model": {"preset": "gpt-tiny", "num_heads": 3}}, "model.num_heads", "Change model.num_heads or model.hidden_size"),
    ({"resources": {"pool": "cup"}}, "resources.pool", "Did you mean 'cpu'?"),
    ({"resources": {"workers": 4}}, "resources.workers", "Lower resources.workers"),
    ({"data": {"path": "/no/such/folder"}}, "data.path", "Nothing of that kind is there"),
    ({"lr": 0.1}, "lr", "Set training.optimizer.learning_rate: 0.1."),
    ({"precision": "fp8"}, "precision.level", "O2: O1 with an FP8 first"),
    ({"labels": {"team": "a\0b"}}, "labels.team", "Change labels.team"),
    ({"name": "a/b"}, "name", "Change name"),
]


@ON_SQLITE
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/validate"])
def test_a_bad_spec_is_refused_with_what_to_change(
    client: TestClient, world: World, spec_document: Document, path: str
) -> None:
    for change, field, words in BAD_SPECS:
        problem = problem_of(client.post(path, json=spec_document | change), 422)
        assert problem.code is ErrorCode.INVALID_REQUEST
        assert [error.field for error in problem.errors] == [field]
        assert words in problem.errors[0].message
        assert problem.errors[0].allowed
        assert world.all_jobs() == []


@ON_SQLITE
def test_a_label_of_another_form_is_refused_in_words(client: TestClient) -> None:
    problem = problem_of(client.get("/v1/jobs", params={"label": "team"}), 422)
    assert problem.errors[0].allowed is not None
    assert problem.errors[0].allowed.startswith("key:value, such as team:research")


@ON_SQLITE
def test_countless_mistakes_are_answered_briefly(client: TestClient, spec_document: Document) -> None:
    mistakes = {f"k{number}": 1 for number in range(900)}
    problem = problem_of(client.post("/v1/jobs", json=spec_document | mistakes), 422)
    assert len(problem.errors) == 100
    assert "(899 more, 99 of them in errors)" in problem.detail
    problem = problem_of(client.get("/v1/jobs", params={f"k{number}": "1" for number in range(1000)}), 422)
    assert len(problem.errors) == 100
    assert "(999 more, 99 of them in errors)" in problem.detail


@ON_SQLITE
def test_what_the_parser_of_json_refuses_is_told(client: TestClient) -> None:
    headers = {"Content-Type": "application/json"}
    for body, reason in ((b"[" * 60_000, "recursion"), (b"9" * 5000, "number out of range")):
        problem = problem_of(client.post("/v1/jobs", content=body, headers=headers), 400)
        assert reason in problem.detail


NOT_JSON = [
    (b"{", "application/json"),
    (b"", "application/json"),
    (b"[" * 60_000, "application/json"),
    (b'{"priority": ' + b"9" * 5000 + b"}", "application/json"),
    (b"\xff\xfe", "application/json"),
    (b"name: small\n", "application/yaml"),
    (b"name=small", "application/x-www-form-urlencoded"),
]


@ON_SQLITE
def test_what_is_not_json_is_refused(client: TestClient) -> None:
    for body, content_type in NOT_JSON:
        response = client.post("/v1/jobs", content=body, headers={"Content-Type": content_type})
        assert response.status_code in {400, 422}, (body[:20], response.text)
        problem_of(response, response.status_code)


@ON_SQLITE
def test_a_body_that_is_too_large_is_refused_however_it_comes(client: TestClient) -> None:
    headers = {"Content-Type": "application/json"}
    for content in (b" " * 65_537, iter([b" " * 40_000] * 2)):
        problem = problem_of(client.post("/v1/jobs", content=content, headers=headers), 413)
        assert problem.code is ErrorCode.PAYLOAD_TOO_LARGE


@ON_SQLITE
def test_many_values_are_refused_before_they_are_checked(
    client: TestClient, spec_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No field is looked at: neither 1,000 wrong labels nor a list of 20,000 numbers cost more than to be read."""
    looked_at: list[object] = []
    check = JobSpec.model_validate_json
    monkeypatch.setattr(JobSpec, "model_validate_json", lambda body: looked_at.append(body) or check(body))
    headers = {"Content-Type": "application/json"}
    labels = {f"wrong {number}": [number] for number in range(1000)}
    for body in (json.dumps(spec_document | {"labels": labels}), f"[{'1, ' * 20_000}1]"):
        problem = problem_of(client.post("/v1/jobs", content=body, headers=headers), 422)
        assert "at most 2000 values" in str(problem.errors[0].allowed)
    assert looked_at == []
    some = spec_document | {"labels": {f"l{number}": "x" for number in range(64)}}
    assert client.post("/v1/jobs", json=some).status_code == 201


def test_pages_stay_put_while_jobs_arrive(client: TestClient, world: World) -> None:
    made = []
    for _ in range(5):
        world.clock.turn(0.01)
        made.append(world.submit())
    first = Page[Job].model_validate_json(client.get("/v1/jobs?limit=2").content)
    assert [job.id for job in first.data] == [made[4], made[3]]
    assert first.has_more
    world.clock.turn(0.01)
    world.submit()
    second = client.get(f"/v1/jobs?limit=2&after={first.last_id}").json()
    assert [job["id"] for job in second["data"]] == [made[2], made[1]]
    last = client.get(f"/v1/jobs?limit=2&after={second['last_id']}").json()
    assert [job["id"] for job in last["data"]] == [made[0]]
    assert last["has_more"] is False


def test_filters(client: TestClient, world: World) -> None:
    plain = world.submit()
    named = world.submit(name="other", labels={"team": "research", "url": "a:b"})
    gpu = world.submit(pool="h100")
    world.cancel(plain)

    def found(query: str) -> set[str]:
        return {job["id"] for job in client.get(f"/v1/jobs?{query}").json()["data"]}

    assert found("name=other") == {named}
    assert found("pool=h100") == {gpu}
    assert found("state=cancelled") == {plain}
    assert found("state=cancelled&state=queued") == {plain, named, gpu}
    assert found("label=team:research&label=url:a:b") == {named}
    assert found("label=team:research&label=url:c") == set()
    assert found("label=team:research&pool=h100") == set()


BAD_QUERIES = [
    ("limit=0", "limit"),
    ("limit=101", "limit"),
    ("limit=x", "limit"),
    ("state=queud", "state.0"),
    ("stat=queued", "stat"),
    ("label=team", "label.0"),
    ("after=job_1", "after"),
    ("name=%00", "name"),
    ("pool=%00", "pool"),
]


@ON_SQLITE
def test_a_bad_query_is_refused(client: TestClient) -> None:
    for query, field in BAD_QUERIES:
        problem = problem_of(client.get(f"/v1/jobs?{query}"), 422)
        assert [error.field for error in problem.errors] == [field], query


@ON_SQLITE
def test_no_route_takes_unknown_parameters(client: TestClient, world: World) -> None:
    job_id = world.submit()
    for path in ("/healthz", "/v1/levels", f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/events", "/metrics"):
        assert problem_of(client.get(f"{path}?verbose=1"), 422).errors[0].field == "verbose"


@ON_SQLITE
def test_a_job_that_is_not_there(client: TestClient) -> None:
    for part in ("", "/events", "/logs", "/metrics", "/checkpoints", "/attempts"):
        for job_id in ("job_01kg9ys7g0zn9d2mqxrybeyjtc", "job_x", "..%2f..%2fetc", "job_%00", "é" * 30):
            assert problem_of(client.get(f"/v1/jobs/{job_id}{part}"), 404).code is ErrorCode.NOT_FOUND, job_id + part


@ON_SQLITE
def test_cancel_is_idempotent_until_the_job_is_over(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    for _ in range(2):
        response = client.post(f"/v1/jobs/{job_id}/cancel")
        assert response.status_code == 202
        assert response.json()["state"] == "cancelling"
    assert [event.type for event in world.events(job_id)].count("job.cancelling") == 1
    rank.succeed()
    problem = problem_of(client.post(f"/v1/jobs/{job_id}/cancel"), 409)
    assert problem.code is ErrorCode.ILLEGAL_TRANSITION
    assert "succeeded" in problem.detail
    problem_of(client.post("/v1/jobs/job_01kg9ys7g0zn9d2mqxrybeyjtc/cancel"), 404)


@ON_SQLITE
def test_pause_and_resume_are_idempotent_and_refused_once_the_job_is_over(client: TestClient, world: World) -> None:
    job_id = world.submit()
    for command, state, desired in (("pause", "paused", "pause"), ("resume", "queued", "run")):
        for _ in range(2):
            response = client.post(f"/v1/jobs/{job_id}/{command}")
            assert response.status_code == 202
            assert (response.json()["state"], response.json()["desired_state"]) == (state, desired)
    client.post(f"/v1/jobs/{job_id}/cancel?save=false")
    for command in ("pause", "resume"):
        problem = problem_of(client.post(f"/v1/jobs/{job_id}/{command}"), 409)
        assert (problem.code, "cancelled" in problem.detail) == (ErrorCode.ILLEGAL_TRANSITION, True)
        problem_of(client.post(f"/v1/jobs/job_01kg9ys7g0zn9d2mqxrybeyjtc/{command}"), 404)


@ON_SQLITE
def test_a_waiting_job_says_why(client: TestClient, world: World) -> None:
    world.submit(workers=2)
    world.dispatch()
    waiting = client.get(f"/v1/jobs/{world.submit()}").json()["queue"]
    why = "needs 1 slot of pool 'cpu'; 0 of 2 are free"
    assert waiting == {"position": 1, "why": why, "missing_slots": 1, "starts_at": None}


@ON_SQLITE
def test_far_back_in_the_queue_only_the_number_is_told(client: TestClient, world: World, monkeypatch: Any) -> None:
    monkeypatch.setattr(store.queue, "HEAD_OF_QUEUE", 2)
    for _ in range(3):
        world.clock.turn(0.01)
        last = world.submit(workers=2)
    urgent = world.submit(priority=51)
    place = {"position": 4, "why": "3 jobs are ahead in pool 'cpu'", "missing_slots": None, "starts_at": None}
    assert client.get(f"/v1/jobs/{last}").json()["queue"] == place
    assert client.get(f"/v1/jobs/{urgent}").json()["queue"]["position"] == 1


@ON_SQLITE
def test_progress_is_what_was_last_reported(client: TestClient, world: World) -> None:
    job_id, rank = world.start()
    rank.train(1, 2)
    progress = client.get(f"/v1/jobs/{job_id}").json()["progress"]
    assert (progress["step"], progress["steps"], progress["loss"]) == (2, 4, 2.5)
    assert progress["tokens_per_s"] == 256
    assert progress["remaining_s"] == 1.0


@ON_SQLITE
def test_the_resolved_recipe_is_shown(client: TestClient, spec_document: Document) -> None:
    """The recipe that follows from an Accelerate user's options, or from a level alone."""
    delayed = {"fp8_config": {"backend": "TE", "amax_history_len": 8, "fp8_format": "E4M3"}}
    for precision, expected in (
        ({"level": "fp32"}, None),
        ({"level": "O2"}, {"scaling": "current", "granularity": "tensor", "format": "HYBRID"}),
        (delayed, {"scaling": "delayed", "amax_history_length": 8, "format": "E4M3"}),
    ):
        document = {**spec_document, "precision": precision}
        for answer in (client.post("/v1/jobs/validate", json=document), client.post("/v1/jobs", json=document)):
            recipe = answer.json()["recipe"]
            assert recipe is None if expected is None else expected.items() <= recipe.items()


@ON_SQLITE
def test_the_keys_of_two_tenants_are_apart(
    world: World, openapi_document: Document, spec_document: Document, tmp_path: Any
) -> None:
    """A tenant that uses another tenant's key neither gets nor learns of that job."""
    keys = {tenant: f"the api key of {tenant} here" for tenant in ("one", "two")}
    settings = Settings(data_dir=tmp_path, api_keys=tuple(f"{tenant}:{key}" for tenant, key in keys.items()))
    app = create_app(settings, database=world.database)
    app.openapi_schema = openapi_document
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:

        def submit(tenant: str, document: Document) -> Any:
            headers = {"Idempotency-Key": "same", "Authorization": f"Bearer {keys[tenant]}"}
            return client.post("/v1/jobs", json=document, headers=headers)

        first, second = submit("one", spec_document), submit("two", spec_document)
        assert first.json()["id"] != second.json()["id"]
        assert "idempotent-replayed" not in second.headers
        assert submit("two", spec_document).json()["id"] == second.json()["id"]
        assert first.json()["id"] not in problem_of(submit("two", spec_document | {"priority": 1}), 422).detail


@ON_SQLITE
def test_only_a_job_that_can_start_wakes_the_dispatcher(
    world: World, openapi_document: Document, spec_document: Document
) -> None:
    woken: list[str] = []
    app = create_app(world.settings, database=world.database, wake=lambda: woken.append("woken"))
    app.openapi_schema = openapi_document
    world.dispatch()
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        for expected in (1, 1):
            client.post("/v1/jobs", json=spec_document | {"resources": {"workers": 2}})
            assert len(woken) == expected
            world.dispatch()
