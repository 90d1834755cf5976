"""Admission by plans: what a plan does to a queued job, and that neither a slow nor a dead planner holds up other jobs."""

import os
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from octet.api_schemas import FailureReason, FinishedReport, JobSpec, JobState, JobSummary, PoolConfig
from octet.api_schemas.job_plan import JobPlan, StepRange, Verdict
from octet.api_schemas.levels import AUTOMATIC, LEVELS
from octet.api_schemas.plan import PlanRequest
from octet.api_schemas.planned_states import states_of
from octet.service.db.tables import AttemptRow
from octet.service.dispatcher import plan as plan_loop
from octet.service.errors import InvalidRequest
from octet.service.jobs import planning
from octet.service.jobs.admission import check_options
from octet.service.jobs.planning import DEADLINE_S, Planning
from octet.service.processes.dispatcher import slots_wanted
from octet.service.settings import Settings
from tests.kit.waiting import LONG_S, wait_until
from tests.service.databases import ON_SQLITE
from tests.service.test_ingest_batches import SUMMARY
from tests.service.world import World

MEMORY = 80 * 10**9
Document = dict[str, Any]


class Promised:
    """A planner that answers when a test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[JobSpec, Future[JobPlan]]] = []

    def plan_job(self, job: JobSpec, pool: PoolConfig) -> "Future[JobPlan]":
        assert pool.memory_per_device_bytes == MEMORY
        self.asked.append((job, Future()))
        return self.asked[-1][1]

    def answer(self, verdict: Verdict = "yes", **changes: Any) -> None:
        """Answer the question that was asked last."""
        job, promise = self.asked[-1]
        promise.set_result(planned(job, verdict).model_copy(update=changes))

    def close(self) -> None:
        return None


def planned(job: JobSpec, verdict: Verdict) -> JobPlan:
    lower = {"yes": MEMORY // 2, "tight": MEMORY - 1, "no": MEMORY + 10**9, "unknown": None}[verdict]
    return JobPlan(
        asked_level=job.precision.level,
        level=None if job.precision.level == "auto" else job.precision.level,
        verdict=verdict,
        reason="no peak today" if lower is None else None,
        memory_per_device_bytes=MEMORY,
        micro_batch_size=4,
        largest_micro_batch=None if lower is None else 2,
        states={"weights": 600, "gradients": 400},
        peak_bytes=lower,
        lower_bytes=lower,
        upper_bytes=lower and round(1.1 * lower),
        states_agree=True,
        planner_version="1",
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    pools = (
        PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=2),
        PoolConfig(name="h100", node_label=("octet-pool", "h100"), slots=8, accelerator="cuda", memory_per_device_bytes=MEMORY),
    )
    return Settings(data_dir=tmp_path / "data", pools=pools)


@pytest.fixture
def planner(world: World) -> Promised:
    promised = Promised()
    world.planning = world.context.planning = promised
    return promised


def types_of(world: World, job_id: str) -> list[str]:
    return [event.type for event in world.events(job_id)]


def message_of(world: World, job_id: str, type_: str) -> str:
    return next(event.message for event in world.events(job_id) if event.type == type_)


@ON_SQLITE
def test_a_job_waits_for_its_plan_while_others_are_placed(world: World, planner: Promised) -> None:
    waiting, other = world.submit(pool="h100"), world.submit(pool="cpu")
    world.dispatch()
    assert world.job(waiting).state is JobState.QUEUED
    assert world.job(other).state is JobState.STARTING
    assert len(planner.asked) == 1, "a pool without memory asks nobody"
    assert slots_wanted(world.database, world.settings.pools) == {"cpu": 1, "h100": 0}, "no node is started in vain"
    planner.answer("yes")
    world.dispatch()
    job = world.job(waiting)
    assert job.state is JobState.STARTING
    assert job.plan is not None
    assert (job.plan.verdict, job.plan.planner_version) == ("yes", "1")
    assert types_of(world, waiting)[:3] == ["job.accepted", "job.planned", "job.placed"]


def test_a_job_that_cannot_fit_is_refused_with_figures_and_remedies(world: World, planner: Promised) -> None:
    job_id = world.submit(pool="h100")
    world.dispatch()
    planner.answer("no", remedies=("training.micro_batch_size 2", "precision.level O2-8bit"))
    world.dispatch()
    job = world.job(job_id)
    assert (job.state, job.reason, job.num_attempts) == (JobState.FAILED, FailureReason.DOES_NOT_FIT, 0)
    for figure in ("80.0 GB", "81.0 GB", "training.micro_batch_size 2, precision.level O2-8bit"):
        assert figure in (job.message or "")
    assert "resources.force" in (job.hint or "")
    assert "81.0 GB" in world.events(job_id)[-1].message, "no attempt has an event with the figures"
    world.retry(job_id)
    world.dispatch()
    assert len(planner.asked) == 2, "a job that was never placed is planned again"
    planner.answer("yes")
    world.dispatch()
    assert world.job(job_id).state is JobState.STARTING


@ON_SQLITE
@pytest.mark.parametrize(
    ("verdict", "force", "event", "words"),
    [
        ("tight", False, "job.may_not_fit", "the largest micro-batch that surely fits is 2, now 4"),
        ("no", True, "job.may_not_fit", "resources.force is set"),
        ("unknown", False, "job.not_planned", "no peak today"),
    ],
)
def test_a_job_that_may_fit_is_placed_with_an_event(
    world: World, planner: Promised, verdict: Verdict, force: bool, event: str, words: str
) -> None:
    job_id = submit_to_h100(world, resources={"pool": "h100", "workers": 1, "force": force})
    world.dispatch()
    planner.answer(verdict)
    world.dispatch()
    assert world.job(job_id).state is JobState.STARTING
    assert words in message_of(world, job_id, event)


def submit_to_h100(world: World, **changes: Any) -> str:
    return world.submit(**({"pool": "h100"} | changes))


def test_auto_is_chosen_once_for_all_attempts(world: World, planner: Promised) -> None:
    job_id = submit_to_h100(world, precision="auto", max_failures=1)
    assert world.job(job_id).spec.precision.level == "auto"
    world.dispatch()
    planner.answer("yes", level="O3-split")
    plan_loop.step(world.context)
    world.restart()  # the dispatcher dies between the plan and the placement
    world.dispatch()
    assert world.launcher.started[-1].spec.precision.level == "O3-split"
    rank = world.rank_of(job_id)
    rank.begin()
    world.launcher.exit(rank.ref, FailureReason.WORKER_LOST, "killed")
    for _ in range(3):
        world.turn(5)
        world.dispatch()
    assert [order.spec.precision.level for order in world.launcher.started] == ["O3-split", "O3-split"]
    job = world.job(job_id)
    assert len(planner.asked) == 1
    assert job.plan is not None
    assert (job.plan.asked_level, job.plan.level, job.spec.precision.level) == ("auto", "O3-split", "O3-split")
    assert "precision.level auto is O3-split" in message_of(world, job_id, "job.planned")


@ON_SQLITE
def test_the_list_by_level_finds_what_auto_has_chosen(world: World, client: TestClient, planner: Promised) -> None:
    job_id = submit_to_h100(world, precision="auto")

    def found(level: str) -> list[str]:
        return [row["id"] for row in client.get("/v1/rows", params={"level": level}).json()["data"]]

    assert found("auto") == [job_id]
    world.dispatch()
    planner.answer("yes", level="te")
    world.dispatch()
    assert (found("auto"), found("te")) == ([], [job_id])


@ON_SQLITE
def test_auto_without_a_choice_is_asked_again_and_then_fails(world: World, planner: Promised) -> None:
    job_id = submit_to_h100(world, precision="auto")
    now_s = 0.0
    world.context.monotonic = lambda: now_s
    world.dispatch()
    planner.answer("unknown")
    while world.job(job_id).state is JobState.QUEUED:
        now_s += plan_loop.ASK_AGAIN_AFTER_S
        world.dispatch()
        if not planner.asked[-1][1].done():
            planner.answer("unknown")
        assert now_s <= 2 * plan_loop.PATIENCE_WITH_AUTO_S
    job = world.job(job_id)
    assert (job.state, job.reason) == (JobState.FAILED, FailureReason.NOT_PLANNED)
    assert now_s >= plan_loop.PATIENCE_WITH_AUTO_S
    assert "no peak today" in (job.message or "")


@ON_SQLITE
def test_a_dispatcher_that_dies_before_the_plan_leaves_the_job_to_the_next(world: World, planner: Promised) -> None:
    job_id = submit_to_h100(world)
    world.dispatch()
    world.planning = second = Promised()
    world.restart()
    world.dispatch()
    planner.answer("no")  # nobody listens any more
    world.dispatch()
    assert world.job(job_id).state is JobState.QUEUED
    second.answer("yes")
    world.dispatch()
    assert world.job(job_id).state is JobState.STARTING


@ON_SQLITE
def test_a_planner_that_never_answers_delays_jobs_by_the_deadline_at_most(world: World, planner: Promised) -> None:
    """Those that are asked about are answered by the planner's own deadline; those behind them stop waiting for a turn."""
    now_s = 0.0
    world.context.monotonic = lambda: now_s
    asked = [submit_to_h100(world) for _ in range(plan_loop.MOST_ASKED)]
    behind = [submit_to_h100(world) for _ in range(3)]
    other = world.submit(pool="cpu")
    world.dispatch()
    assert world.job(other).state is JobState.STARTING
    assert len(planner.asked) == plan_loop.MOST_ASKED
    now_s = DEADLINE_S - 1
    world.dispatch()
    assert {world.job(job_id).state for job_id in behind} == {JobState.QUEUED}
    now_s = DEADLINE_S
    world.dispatch()
    assert {world.job(job_id).state for job_id in behind} == {JobState.STARTING}
    assert "its turn to be planned did not come" in message_of(world, behind[0], "job.not_planned")
    assert {world.job(job_id).state for job_id in asked} == {JobState.QUEUED}


@ON_SQLITE
def test_a_planner_that_raises_is_an_event(world: World, planner: Promised) -> None:
    job_id = submit_to_h100(world)
    world.dispatch()
    planner.asked[-1][1].set_exception(RuntimeError("out of threads"))
    world.dispatch()
    assert world.job(job_id).state is JobState.STARTING
    assert "out of threads" in message_of(world, job_id, "job.not_planned")


def test_a_job_that_ended_says_how_much_of_its_plan_was_measured(world: World, client: TestClient, planner: Promised) -> None:
    summaries = [(None, {"weights": 700, "gradients": 500}, 1.2)]
    summaries += [(MEMORY // 2 + number * MEMORY // 100, {}, 1 + number / 50) for number in range(9)]
    for number, (peak, held, ratio) in enumerate(summaries):
        job_id = submit_to_h100(world)
        world.dispatch()
        planner.answer("yes", predicted_step=StepRange(least_s=0.1, most_s=0.4))
        world.dispatch()
        rank = world.rank_of(job_id)
        rank.begin()
        assert pool_ratios(client) == (None, None)
        measured = {"peak_memory_bytes": peak, "memory_bytes": held, "step_time_s": 0.2 + 0.02 * number}
        rank.send(FinishedReport(outcome="succeeded", summary=JobSummary.model_validate(SUMMARY | measured)))
        shown = client.get(f"/v1/jobs/{job_id}").json()
        assert shown["measured_to_planned"] == pytest.approx(ratio)
        assert shown["step_time_to_planned"] == pytest.approx(1 + 0.1 * number)
        assert shown["plan"]["predicted_step"] == {"least_s": 0.1, "most_s": 0.4}
        assert shown["summary"]["step_time_s"] == measured["step_time_s"]
        world.dispatch()
    assert pool_ratios(client) == (pytest.approx(1.09), pytest.approx(1.45))


def pool_ratios(client: TestClient) -> tuple[float | None, float | None]:
    pool = client.get("/v1/pools").json()["data"][1]
    return pool["measured_to_planned"], pool["step_time_to_planned"]


@ON_SQLITE
def test_a_job_that_nobody_planned_is_measured_by_its_states(world: World, client: TestClient) -> None:
    """A GPU's peak has nothing to be compared with, nor have the bytes of fewer ranks than were asked for."""
    held = states_of(world.spec, world.spec.model.sizes).held
    for peak, attempt_workers, ratio in ((None, 1, 1.0), (MEMORY, 1, None), (None, 2, None)):
        job_id = world.submit(pool="cpu")
        world.dispatch()
        rank = world.rank_of(job_id)
        rank.begin()
        with world.database.write() as session:
            session.execute(update(AttemptRow).where(AttemptRow.job_id == job_id).values(workers=attempt_workers))
        measured = {"peak_memory_bytes": peak, "memory_bytes": held}
        rank.send(FinishedReport(outcome="succeeded", summary=JobSummary.model_validate(SUMMARY | measured)))
        assert client.get(f"/v1/jobs/{job_id}").json()["measured_to_planned"] == ratio
        world.launcher.exit(rank.ref)
        world.dispatch()


@ON_SQLITE
def test_auto_is_refused_in_a_pool_that_states_no_memory(client: TestClient, spec_document: Document) -> None:
    answer = client.post("/v1/jobs", json=spec_document | {"precision": "auto", "resources": {"pool": "cpu"}})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == "precision.level"
    assert "pools with memory_per_device_bytes: h100" in error["allowed"]


@ON_SQLITE
@pytest.mark.parametrize(
    ("changes", "has_planner", "allowed"),
    [
        ({}, False, "planner is off"),
        ({"model": {"family": "python", "entrypoint": "never_imported:build"}}, True, "steps of family python are not traced"),
    ],
)
def test_auto_is_refused_where_no_peak_can_be_known(
    world: World, spec_document: Document, changes: Document, has_planner: bool, allowed: str
) -> None:
    job = JobSpec.model_validate(spec_document | {"precision": "auto", "resources": {"pool": "h100"}} | changes)
    pools = tuple(pool.model_copy(update={"allows_entrypoints": True}) for pool in world.settings.pools)
    with pytest.raises(InvalidRequest) as refused:
        check_options(job, world.settings.model_copy(update={"planner": has_planner, "pools": pools}))
    assert allowed in refused.value.errors[0].allowed


@ON_SQLITE
def test_states_alone_refuse_without_a_trace(world: World, spec_document: Document) -> None:
    """The planner's process is off: what the closed form says is enough."""
    pool = world.settings.pools[1].model_copy(update={"memory_per_device_bytes": 10**5})
    job = JobSpec.model_validate(spec_document | {"precision": "bf16-amp", "resources": {"pool": "h100"}})
    planner = Planning(world.settings.model_copy(update={"pools": (pool,), "planner": False}))
    try:
        plan = planner.plan_job(job, pool).result(LONG_S)
    finally:
        planner.close()
    assert plan.verdict == "no"
    assert plan.peak_bytes is None
    assert plan.lower_bytes == sum((plan.states or {}).values()) > 10**5


@pytest.mark.slow
@pytest.mark.system
@ON_SQLITE
def test_the_process_chooses_the_first_level_whose_upper_bound_fits(
    world: World, spec_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the submission to the rank's order, with the real planner; memory is just what level O2 takes at most."""
    monkeypatch.setattr(planning, "DEADLINE_S", LONG_S)
    model = spec_document["model"] | {"hidden_size": 128, "num_layers": 2, "vocab_size": 512}
    job = JobSpec.model_validate(spec_document | {"model": model, "precision": "auto"})
    planner = Planning(settings_with(world, 10**12))
    levels = AUTOMATIC[: AUTOMATIC.index("O2") + 1]
    try:
        rows = planner.plan(PlanRequest(job=job, levels=levels)).result(LONG_S).rows
        most = {row.level: row.fits[0].upper_bytes or 0 for row in rows}
        assert most["O2"] < most["bf16-amp"], "the most precise level does not fit, and another does"
        world.settings = world.context.settings = planner._planner._settings = settings_with(world, most["O2"])
        world.context.planning = planner
        job_id = world.submit(model=model, precision="auto", pool="cpu")
        wait_until(lambda: dispatched(world).job(job_id).state is not JobState.QUEUED)
        num_traces = len({LEVELS[level].passes for level in levels})
        assert next(planner._planner._numbers) == num_traces < len(levels), "the plan asks for what was traced already"
    finally:
        planner.close()
    chosen = next(level for level in levels if most[level] <= most["O2"])
    assert world.launcher.started[-1].spec.precision.level == chosen
    plan = world.job(job_id).plan
    assert plan is not None
    assert (plan.verdict, plan.upper_bytes, plan.states_agree) == ("yes", most[chosen], True)


def settings_with(world: World, memory: int) -> Settings:
    pool = world.settings.pools[0].model_copy(update={"memory_per_device_bytes": memory})
    return world.settings.model_copy(update={"planner": True, "pools": (pool,)})


def dispatched(world: World) -> World:
    world.dispatch()
    return world


@pytest.mark.slow
@ON_SQLITE
def test_a_storm_of_jobs_while_the_planner_is_killed(world: World, client: TestClient, spec_document: Document) -> None:
    """Every submission is stored, and every job is placed: without a plan where the process died."""
    pool = world.settings.pools[1].model_copy(update={"slots": 64})
    settings = world.settings.model_copy(update={"planner": True, "pools": (world.settings.pools[0], pool)})
    world.settings = world.context.settings = settings
    world.launcher.slots_present["h100"] = 64
    planner = world.context.planning = Planning(settings)
    killed: set[int] = set()

    def kill_and_dispatch() -> bool:
        process = planner._planner._process
        if process is not None and process.returncode is None and process.pid not in killed:
            killed.add(process.pid)
            os.kill(process.pid, signal.SIGKILL)
        world.dispatch()
        return {world.job(job_id).state for job_id in jobs} == {JobState.STARTING}

    try:
        jobs = []
        for number in range(24):
            model = spec_document["model"] | {"hidden_size": 32 * (1 + number)}
            document = spec_document | {"model": model, "resources": {"pool": "h100"}}
            answer = client.post("/v1/jobs", json=document)
            assert answer.status_code == 201, answer.text
            jobs.append(answer.json()["id"])
        wait_until(kill_and_dispatch)
    finally:
        planner.close()
    assert killed
    assert any("ended with status" in message_of(world, job_id, "job.not_planned") for job_id in jobs)


@ON_SQLITE
def test_a_pool_that_states_no_memory_starts_no_planner(world: World) -> None:
    planner = world.context.planning = Planning(world.settings)
    world.submit(pool="cpu")
    world.dispatch()
    assert planner._thread is None
