"""Comparisons through the API and the dispatcher: children as ordinary jobs, and the same report whatever is killed."""

import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import EvaluationReport, FailureReason, FinishedReport, JobState, Page
from octet.api_schemas.comparison import Comparison, ComparisonState
from octet.api_schemas.comparison_report import ComparisonDetails
from octet.service.dispatcher import compare
from octet.service.jobs import commands, comparisons
from tests.kit.summaries import summary_of
from tests.service.databases import ON_SQLITE
from tests.service.invariants import check_invariants
from tests.service.test_jobs_api import problem_of
from tests.service.world import World, step

Document = dict[str, Any]
SHIFT = {"fp32": 0.0, "O1": 0.0002, "O2": 0.05, "noise": 0.0001}
"""The gap of each arm's loss: O1 is as good as fp32, O2 is bad."""


@pytest.fixture
def asked(spec_document: Document) -> Document:
    training = spec_document["training"] | {"seed": 0}
    return {"job": spec_document | {"training": training}, "levels": ["fp32", "O1", "O2"], "seeds": 4, "tolerance": 0.0025}


def submit(client: TestClient, asked: Document, key: str | None = None) -> Comparison:
    response = client.post("/v1/comparisons", json=asked, headers={} if key is None else {"Idempotency-Key": key})
    assert response.status_code == 201, response.text
    comparison = Comparison.model_validate_json(response.content)
    assert response.headers["location"] == f"/v1/comparisons/{comparison.id}"
    return comparison


def read(client: TestClient, comparison_id: str) -> ComparisonDetails:
    response = client.get(f"/v1/comparisons/{comparison_id}")
    assert response.status_code == 200, response.text
    return ComparisonDetails.model_validate_json(response.content)


def loss_of(arm: str, seed: int) -> float:
    """A loss that depends on nothing but the arm and the seed, with the chance that a calm setting has."""
    chance = random.Random(f"{arm} {seed}").gauss(0, 0.0001)
    return (2.0 + seed / 100) * (1 + SHIFT[arm] + chance)


def finish(world: World, job_id: str, failures: Mapping[str, FailureReason] | None = None) -> None:
    """Let the running attempt of a child train and end. failures: of arms that fail."""
    rank = world.rank_of(job_id)
    rank.begin()
    labels = world.job(job_id).labels
    loss = loss_of(labels["arm"], int(labels["seed"]))
    rank.send(step(1), EvaluationReport(step=1, loss=loss, tokens=10, metrics={"accuracy": 0.5}))
    reason = (failures or {}).get(labels["arm"])
    succeeded = FinishedReport(outcome="succeeded", summary=summary_of(loss))
    rank.send(succeeded if reason is None else FinishedReport(outcome="failed", reason=reason, message="as planned"))
    world.launcher.exit(rank.ref)


def running(world: World) -> list[str]:
    live = {JobState.STARTING, JobState.RUNNING}
    present = {order.job_id for order in world.launcher.orders.values()}
    return sorted(row.id for row in world.all_jobs() if row.state in live and row.id in present)


def run(
    world: World,
    look: Callable[[], ComparisonDetails],
    disturb: Callable[[], None] = lambda: None,
    failures: Mapping[str, FailureReason] | None = None,
) -> ComparisonDetails:
    """Let children end one at a time, until the comparison is over."""
    for _ in range(200):
        found = look()
        if found.state.is_terminal:
            return found
        disturb()
        world.dispatch()
        world.turn(1)
        for job_id in running(world)[:1]:
            finish(world, job_id, failures)
    raise AssertionError("the comparison does not end")


@ON_SQLITE
def test_a_comparison_finds_the_bad_arm_and_calls_the_twin_equal(client: TestClient, world: World, asked: Document) -> None:
    comparison = submit(client, asked)
    assert comparison.state is ComparisonState.RUNNING
    found = run(world, lambda: read(client, comparison.id))
    assert (found.state, found.message) == (ComparisonState.FINISHED, "all are certain")
    assert [arm.answer for arm in found.report.arms] == ["baseline", "yes", "no"]
    assert found.report.noise is not None
    assert found.report.not_calm is None
    assert {(each.measure, each.is_relative) for each in found.report.arms[1].gaps} == {
        ("training_loss", True),
        ("loss", True),
        ("accuracy", False),
    }
    first = [(child.arm, child.seed) for child in sorted(found.children, key=lambda child: child.job_id)]
    assert first[:4] == [("fp32", 0), ("noise", 0), ("fp32", 1), ("noise", 1)]
    assert len(first) < 2 + 3 * 4, "it stops once the answers are certain"
    check_invariants(world)


@ON_SQLITE
def test_no_answer_is_certain_before_the_least_seeds(client: TestClient, world: World, asked: Document) -> None:
    comparison = submit(client, asked | {"seeds": 6, "least_seeds": 5})
    found = run(world, lambda: read(client, comparison.id))
    assert found.message == "all are certain"
    assert [len(arm.seeds) for arm in found.report.arms] == [5, 5, 5]


@ON_SQLITE
def test_children_are_ordinary_jobs_and_a_few_at_a_time(client: TestClient, world: World, asked: Document) -> None:
    comparison = submit(client, asked | {"at_once": 1})
    alive: list[int] = []

    def count() -> None:
        alive.append(sum(not row.state.is_terminal for row in world.all_jobs()))

    found = run(world, lambda: read(client, comparison.id), count)
    assert max(alive) == 1
    jobs = client.get("/v1/jobs", params={"label": f"comparison:{comparison.id}", "limit": 100}).json()["data"]
    assert {job["id"] for job in jobs} == {child.job_id for child in found.children}
    by_seed = {(job["labels"]["arm"], job["labels"]["seed"]): job["spec"]["training"] for job in jobs}
    assert by_seed["fp32", "1"] == by_seed["O2", "1"]
    assert by_seed["noise", "1"] == by_seed["fp32", "1"] | {"start_change": 1e-3}


@pytest.mark.system
@ON_SQLITE
@pytest.mark.parametrize("seed", range(3))
def test_the_report_is_the_same_whatever_is_killed(
    client: TestClient, world: World, asked: Document, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Dispatchers die between and within transactions, and children end in other orders: nothing is queued twice."""
    expected = run(world, lambda: read(client, submit_id)) if (submit_id := submit(client, asked).id) else None
    assert expected is not None
    chance, submit_all = random.Random(seed), commands.submit_all

    def dies(*arguments: Any) -> Any:
        result = submit_all(*arguments)
        if chance.random() < 0.4:
            raise SystemExit("killed before the commit")
        return result

    def disturb() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(commands, "submit_all", dies)
            try:
                compare.step(world.context)
            except SystemExit:
                world.restart()
        if chance.random() < 0.3:
            world.restart()
        for job_id in chance.sample(running(world), len(running(world)))[:1]:
            finish(world, job_id)

    second = submit(client, asked | {"at_once": 2 + seed}).id
    found = run(world, lambda: read(client, second), disturb)
    assert found.report == expected.report
    assert len({(child.arm, child.seed) for child in found.children}) == len(found.children)
    check_invariants(world)


def test_a_setting_that_is_too_wild_stops_before_any_arm(
    client: TestClient, world: World, asked: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHIFT, "noise", 0.02)
    comparison = submit(client, asked)
    found = run(world, lambda: read(client, comparison.id))
    assert found.state is ComparisonState.TOO_WILD
    assert found.message is not None
    assert "the setting is not calm" in found.message
    assert {child.arm for child in found.children} == {"fp32", "noise"}


@ON_SQLITE
def test_an_arm_that_diverges_and_one_that_fails(client: TestClient, world: World, asked: Document) -> None:
    reasons = {"O1": FailureReason.DATA_ERROR, "O2": FailureReason.DIVERGED}
    comparison = submit(client, asked)
    found = run(world, lambda: read(client, comparison.id), failures=reasons)
    assert [arm.answer for arm in found.report.arms] == ["baseline", "failed", "no"]
    assert found.state is ComparisonState.FINISHED


def test_a_baseline_that_fails_ends_it(client: TestClient, world: World, asked: Document) -> None:
    comparison = submit(client, asked)
    world.dispatch()
    world.dispatch()
    finish(world, running(world)[0], {"fp32": FailureReason.DIVERGED})
    world.turn(1)
    world.dispatch()
    found = read(client, comparison.id)
    assert (found.state, found.message) == (
        ComparisonState.FAILED,
        "the baseline fp32 diverged with seed 0: diverged: as planned",
    )
    states = [world.job(child.job_id).state for child in found.children]
    assert set(states) <= {JobState.FAILED, JobState.CANCELLED, JobState.CANCELLING}


@ON_SQLITE
def test_deleted_children_break_nothing(client: TestClient, world: World, asked: Document) -> None:
    comparison = submit(client, asked | {"at_once": 4})

    def disturb() -> None:
        for row in world.all_jobs():
            attempts = world.attempts(row.id)
            if row.state is JobState.SUCCEEDED and all(attempt.released_at for attempt in attempts):
                world.delete(row.id)

    found = run(world, lambda: read(client, comparison.id), disturb)
    assert found.state is ComparisonState.FINISHED
    assert [arm.answer for arm in found.report.arms] == ["baseline", "yes", "no"]
    assert any(child.state is None for child in found.children)


def test_pausing_resuming_and_cancelling_does_so_to_all(client: TestClient, world: World, asked: Document) -> None:
    comparison = submit(client, asked | {"at_once": 4})
    path = f"/v1/comparisons/{comparison.id}"
    world.dispatch()
    world.dispatch()
    ranks = [world.rank_of(job_id) for job_id in running(world)]
    assert client.post(f"{path}/pause").json()["state"] == "paused"
    states = sorted(row.state for row in world.all_jobs())
    assert states == [JobState.PAUSED, JobState.PAUSED, JobState.PAUSING, JobState.PAUSING]
    assert client.post(f"{path}/pause").status_code == 202
    assert problem_of(client.post(f"{path}/resume"), 409).detail.startswith("the job is pausing")
    for rank in ranks:
        rank.begin()
        rank.send(FinishedReport(outcome="cancelled"))
    world.dispatch()
    assert {row.state for row in world.all_jobs()} == {JobState.PAUSED}
    assert client.post(f"{path}/resume").json()["state"] == "running"
    assert {row.state for row in world.all_jobs()} == {JobState.QUEUED}
    assert client.post(f"{path}/cancel").json()["state"] == "cancelled"
    assert {row.state for row in world.all_jobs()} == {JobState.CANCELLED}
    world.dispatch()
    assert len(world.all_jobs()) == 4
    for verb in ("pause", "resume", "cancel"):
        assert "the comparison is cancelled" in problem_of(client.post(f"{path}/{verb}"), 409).detail
    check_invariants(world)


@ON_SQLITE
def test_the_same_key_gives_the_same_comparison(client: TestClient, asked: Document, spec_document: Document) -> None:
    first = submit(client, asked, "one")
    again = client.post("/v1/comparisons", json=dict(reversed(asked.items())), headers={"Idempotency-Key": "one"})
    assert (again.json()["id"], again.headers["idempotent-replayed"]) == (first.id, "true")
    other = client.post("/v1/comparisons", json=asked | {"seeds": 3}, headers={"Idempotency-Key": "one"})
    assert problem_of(other, 422).code == "idempotency_mismatch"
    as_job = client.post("/v1/jobs", json=spec_document, headers={"Idempotency-Key": "one"})
    assert "which is no job" in problem_of(as_job, 422).detail
    assert [each.id for each in Page[Comparison].model_validate_json(client.get("/v1/comparisons").content).data] == [first.id]


@ON_SQLITE
def test_every_arm_is_checked_as_a_job(client: TestClient, world: World, asked: Document) -> None:
    def refused(**fields: Any) -> list[tuple[str, str]]:
        answer = problem_of(client.post("/v1/comparisons", json=asked | {"levels": [], **fields}), 422)
        return [(error.field, error.message) for error in answer.errors]

    ((field, message),) = refused(vary={"resources.pool": ["cpu", "gpu"]})
    assert field == "job.resources.pool"
    assert message.startswith("Arm pool=gpu could not run here. no such pool.")
    ((field, message),) = refused(vary={"training.optimizer.learning_rate": [1e-3, -1.0]})
    assert field == "job.training.optimizer.learning_rate"
    ((field, message),) = refused(vary={"training.gradient_clip": [0.5, 1.0, None]})
    assert (field, message) == ("vary", "These arms are the same job. Remove one of them.")
    ((field, _),) = refused(levels=["O2", "O9"])
    assert field == "levels.1"
    assert world.all_jobs() == []


@ON_SQLITE
def test_what_is_not_there(client: TestClient) -> None:
    assert problem_of(client.get("/v1/comparisons/cmp_1"), 404).detail == "there is no such comparison"
    missing = "cmp_" + "0" * 26
    assert missing in problem_of(client.get(f"/v1/comparisons/{missing}"), 404).detail
    assert missing in problem_of(client.post(f"/v1/comparisons/{missing}/pause"), 404).detail
    assert problem_of(client.get("/v1/comparisons", params={"after": "job_1"}), 422).errors[0].field == "after"


def test_a_comparison_is_deleted_once_it_is_over_and_its_jobs_stay(client: TestClient, world: World, asked: Document) -> None:
    path = f"/v1/comparisons/{submit(client, asked, 'one').id}"
    world.dispatch()
    assert "Cancel it first" in problem_of(client.delete(path), 409).detail
    client.post(f"{path}/cancel")
    jobs = [row.id for row in world.all_jobs()]
    assert client.delete(path).status_code == 204
    problem_of(client.get(path), 404)
    problem_of(client.delete(path), 404)
    assert (jobs, client.get("/v1/comparisons").json()["data"]) == ([row.id for row in world.all_jobs()], [])
    again = client.post("/v1/comparisons", json=asked, headers={"Idempotency-Key": "one"})
    assert "which is deleted" in problem_of(again, 422).detail
    check_invariants(world)


@ON_SQLITE
def test_an_arm_that_has_its_answer_trains_no_more(client: TestClient, world: World, asked: Document) -> None:
    comparison = submit(client, asked | {"at_once": 100})
    found = run(world, lambda: read(client, comparison.id), failures={"O2": FailureReason.DIVERGED})
    children = [world.job(each.job_id) for each in found.children if each.arm == "O2"]
    assert [child.state for child in children] == [JobState.FAILED] + 3 * [JobState.CANCELLED]
    assert found.finished_at is not None
    assert all(child.finished_at is not None and child.finished_at < found.finished_at for child in children)


def test_a_comparison_that_cannot_go_on_holds_up_no_other(
    client: TestClient, world: World, asked: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, sound = submit(client, asked).id, submit(client, asked).id
    queue_next = comparisons.queue_next

    def fails(session: Any, row: Any, *rest: Any) -> None:
        if row.id == broken:
            raise ValueError("its spec is of another version")
        queue_next(session, row, *rest)

    monkeypatch.setattr(comparisons, "queue_next", fails)
    with ThreadPoolExecutor(1) as executor:
        monkeypatch.setattr(world.context, "executor", executor)
        woken: list[int] = []
        monkeypatch.setattr(world.context, "wake", lambda: woken.append(1))
        now_s = [0.0]
        monkeypatch.setattr(world.context, "monotonic", lambda: now_s[0])
        world.context.health.enter("compare")
        for now_s[0] in (0.0, 1.0, 2.0, 3.0, 5.9):
            compare.step(world.context)
        assert len(woken) == 1, "what cannot go on wakes nobody"
        (counted,) = world.context.health.collect()
        assert counted.samples[0].value == 2, "it is tried after 2 s, then after 4 s more"
    assert [len(read(client, each).children) for each in (broken, sound)] == [0, 2]


@ON_SQLITE
def test_reports_are_made_once_for_their_outcomes(
    client: TestClient, world: World, asked: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients read a comparison each second, and one of 32 arms takes 0.7 s to report."""
    made: list[int] = []
    report_of = comparisons.report_of
    monkeypatch.setattr(comparisons, "report_of", lambda *asked: made.append(len(asked[1])) or report_of(*asked))
    comparison = submit(client, asked)

    def look() -> ComparisonDetails:
        return [read(client, comparison.id) for _ in range(3)][-1]

    found = run(world, look)
    num_outcomes = sum(child.outcome is not None for child in found.children)
    assert made == sorted(set(made))
    assert made[-1] == num_outcomes
    with world.database.read() as session:
        whole, short = (comparisons.outcomes_of(session, found.id, has_points=each) for each in (True, False))
    assert all(outcome.points for outcome in whole.values() if outcome.kind == "succeeded")
    assert short == {child: outcome.model_copy(update={"points": ()}) for child, outcome in whole.items()}


def test_a_child_that_is_retried_gives_its_new_outcome(client: TestClient, world: World, asked: Document) -> None:
    """The first outcome of O1 is a failure, which a retry makes good. The report of the first is not shown again."""
    comparison = submit(client, asked | {"at_once": 1})
    retried: list[str] = []

    def look() -> ComparisonDetails:
        found = read(client, comparison.id)
        for child in found.children:
            if not retried and child.arm == "O1" and child.outcome == "failed":
                assert found.report.arms[1].answer == "failed"
                world.retry(child.job_id)
                retried.append(child.job_id)
                again = read(client, comparison.id)
                assert [each.outcome for each in again.children if each.job_id == child.job_id] == [None]
                assert again.report.arms[1].answer != "failed"
        return found

    failures: dict[str, FailureReason] = {"O1": FailureReason.DATA_ERROR}
    found = run(world, look, lambda: failures.clear() if retried else None, failures)
    assert retried
    assert [child.outcome for child in found.children if child.job_id == retried[0]] == ["succeeded"]
    assert [arm.answer for arm in found.report.arms] == ["baseline", "yes", "no"]
    check_invariants(world)


@ON_SQLITE
def test_a_retry_after_the_end_changes_no_report(client: TestClient, world: World, asked: Document) -> None:
    comparison = submit(client, asked)
    found = run(world, lambda: read(client, comparison.id), failures={"O2": FailureReason.DIVERGED})
    failed = next(child.job_id for child in found.children if child.outcome == "diverged")
    world.retry(failed)
    again = read(client, comparison.id)
    assert (again.state, again.report) == (found.state, found.report)
    assert [child.outcome for child in again.children if child.job_id == failed] == ["diverged"]


def test_a_comparison_that_cannot_be_read_is_left_out_and_others_go_on(
    client: TestClient, world: World, asked: Document
) -> None:
    first, broken, last = sorted(submit(client, asked).id for _ in range(3))  # all in one millisecond
    with world.database.write() as session:
        row = comparisons.store.comparisons.find(session, broken)
        assert row is not None
        row.spec = {"levels": "of another version"}
    shown = client.get("/v1/comparisons", params={"limit": 1})
    assert shown.status_code == 200, shown.text
    assert ([each["id"] for each in shown.json()["data"]], shown.json()["has_more"]) == ([last], True)
    rest = client.get("/v1/comparisons", params={"limit": 1, "after": last}).json()
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == ([first], False)
    compare.step(world.context)
    assert [len(read(client, each).children) for each in (first, last)] == [2, 2]
    assert list(world.context.failed_comparisons) == [broken]


@ON_SQLITE
def test_a_comparison_ends_when_its_jobs_have_used_its_budget(client: TestClient, world: World, asked: Document) -> None:
    """Two children have a slot each, for five seconds: ten slot seconds."""
    within = submit(client, asked | {"budget_slot_hours": 10.5 / 3600, "at_once": 2})
    world.dispatch()
    world.dispatch()
    assert len(running(world)) == 2
    world.turn(5)
    world.dispatch()
    assert read(client, within.id).state is ComparisonState.RUNNING
    world.turn(1)
    world.dispatch()
    found = read(client, within.id)
    assert found.state is ComparisonState.FINISHED
    assert str(found.message).endswith("slot hours is used; 2 of 2 arms have no certain answer")
    world.dispatch()
    assert {child.state for child in read(client, within.id).children} <= {JobState.CANCELLING, JobState.CANCELLED}
