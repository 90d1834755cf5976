"""`POST /v1/plans`: rows of levels, refusals, and a planner's process that traces, is off, or is killed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octet.api_schemas import JobSpec, PoolConfig
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.plan import ONLY_STATES, Plan, PlanRequest, TraceRequest, candidates, trace_key, traces_of
from octet.service.jobs import planning
from octet.service.jobs.planning import Planner
from octet.service.settings import Settings
from tests.kit.waiting import LONG_S
from tests.service.databases import ON_SQLITE

Document = dict[str, Any]
MEMORY = 80 * 10**9
PIPELINE: Document = {"parallelism": {"pipeline": 2}, "resources": {"workers": 2}}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    pool = PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=2, memory_per_device_bytes=MEMORY)
    return Settings(data_dir=tmp_path / "data", pools=(pool,), planner=False)


@ON_SQLITE
def test_a_plan_lists_every_level_with_its_states(client: TestClient, spec_document: Document) -> None:
    response = client.post("/v1/plans", json={"job": spec_document})
    assert response.status_code == 200, response.text
    plan = Plan.model_validate_json(response.content)
    assert [row.level for row in plan.rows] == list(LEVELS)
    assert all(row.states and row.peak_bytes is None for row in plan.rows)
    own = next(row for row in plan.rows if row.level == JobSpec.model_validate(spec_document).precision.level)
    assert "planner is off" in (own.reason or "")
    assert [(fit.pool, fit.verdict) for fit in own.fits] == [("cpu", "unknown")]
    assert own.converted_layers is None
    assert [row.converted_layers for row in plan.rows if row.level == "O2"] == [4]
    assert plan.missing == ()
    assert {row.reason for row in plan.rows} == {own.reason}, "all peaks were asked for"
    response = client.post("/v1/plans", json={"job": spec_document, "peaks": "own"})
    reasons = {row.level: row.reason for row in Plan.model_validate_json(response.content).rows}
    assert {level for level, reason in reasons.items() if reason != ONLY_STATES} == {own.level}


@ON_SQLITE
def test_rows_are_sent_before_their_peaks_are_known(client: TestClient, spec_document: Document) -> None:
    request, accepts = {"job": spec_document, "levels": ["fp32", "O2"]}, {"Accept": "application/x-ndjson"}
    answer = client.post("/v1/plans", json=request, headers=accepts)
    assert answer.headers["content-type"] == "application/x-ndjson"
    first, *_, last = [Plan.model_validate_json(line) for line in answer.text.splitlines()]
    assert last.model_dump(mode="json") == client.post("/v1/plans", json=request).json()
    assert {row.reason for row in first.rows} == {"its peak is being traced"}
    assert [row.states for row in first.rows] == [row.states for row in last.rows]
    assert client.post("/v1/plans", json={"job": spec_document, "levels": ["O9"]}, headers=accepts).status_code == 422


def test_the_level_that_was_asked_for_is_traced_first(spec_document: Document) -> None:
    job = JobSpec.model_validate(spec_document | {"precision": {"level": "te"}})
    found = candidates(PlanRequest(job=job, levels=("fp32", "te", "O2")))
    levels = [request.job.precision.level for request in traces_of(found, "te")]
    assert levels == ["te", *(each.level for each in found if each.level != "te")]


def test_one_trace_serves_a_sweep_but_not_packed_jobs_too(spec_document: Document) -> None:
    def key(data: Document, training: Document) -> str:
        parts = {"data": spec_document["data"] | data, "training": spec_document["training"] | training}
        return trace_key(TraceRequest(id="0.0", job=JobSpec.model_validate(spec_document | parts)))

    assert key({}, {"seed": 7, "steps": 9}) == key({}, {})
    assert key({"packing": True}, {}) != key({}, {})


@pytest.mark.system
def test_rows_come_with_their_peaks(settings: Settings, spec_document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "DEADLINE_S", LONG_S)
    job = JobSpec.model_validate(spec_document | {"precision": {"level": "te"}})
    known: list[Plan] = []

    async def plan() -> Plan:
        planner = Planner(settings.model_copy(update={"planner": True}))
        try:
            return await planner.plan(PlanRequest(job=job, levels=("O2", "te")), known.append)
        finally:
            await planner.close()

    whole = asyncio.run(plan())
    peaks = [[row.level for row in plan.rows if row.peak_bytes is not None] for plan in (*known, whole)]
    assert peaks[0] == []
    assert peaks[-1] == ["O2", "te"]
    assert next(filter(None, peaks)) == ["te"], "the job's own level comes first"
    own = [row for plan in (*known, whole) for row in plan.rows if row.level == "te" and row.peak_bytes is not None]
    for row in own:  # two processes trace side by side: the largest micro-batch may be known as early as the peak
        is_whole = row.fits[0].largest_micro_batch is not None
        assert row.reason == (None if is_whole else "its largest micro-batch is being traced")
    assert own[-1].fits[0].largest_micro_batch is not None
    assert {row.peak_bytes for row in own} == {own[0].peak_bytes}


def test_a_plan_says_what_its_pool_lacks(settings: Settings, spec_document: Document) -> None:
    bare = settings.pools[0].model_copy(update={"memory_per_device_bytes": None})
    request = PlanRequest(job=JobSpec.model_validate(spec_document))
    plan = asyncio.run(Planner(settings.model_copy(update={"pools": (bare,)})).plan(request))
    (missing,) = plan.missing
    assert missing.startswith("pool 'cpu' states no memory: set its memory_per_device_bytes")


def test_a_server_without_triton_says_so(settings: Settings, spec_document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's CPU build comes without it."""
    monkeypatch.setattr(planning, "find_spec", lambda name: None if name == "triton" else object())
    planner = Planner(settings.model_copy(update={"planner": True}))
    plan = asyncio.run(planner.plan(PlanRequest(job=JobSpec.model_validate(spec_document), levels=("O2",))))
    assert plan.rows[0].states
    assert (plan.rows[0].reason or "").endswith("pip install triton")


@ON_SQLITE
def test_a_plan_of_a_wrong_job_is_refused_by_its_field(client: TestClient, spec_document: Document) -> None:
    for job, levels, field in (
        (spec_document | {"modle": {}}, [], "job.modle"),
        (spec_document | {"resources": {"pool": "mars"}}, [], "resources.pool"),
        (spec_document, ["O9"], "levels.0"),
    ):
        answer = client.post("/v1/plans", json={"job": job, "levels": levels})
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == field


@ON_SQLITE
def test_validate_says_what_a_rank_would_hold(client: TestClient, spec_document: Document) -> None:
    states = client.post("/v1/jobs/validate", json=spec_document).json()["states"]
    plan = client.post("/v1/plans", json={"job": spec_document}).json()
    own = JobSpec.model_validate(spec_document).precision.level
    assert states == next(row["states"] for row in plan["rows"] if row["level"] == own)
    assert states["weights"] > 0


@pytest.mark.slow
@pytest.mark.system
def test_a_process_traces_peaks_and_is_started_again_after_it_was_killed(
    settings: Settings, spec_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that was started again answers after its deadlines: the late peak is traced once, and kept."""
    monkeypatch.setattr(planning, "DEADLINE_S", LONG_S)
    job = JobSpec.model_validate(spec_document | {"precision": {"level": "O2"}})
    other = JobSpec.model_validate(spec_document | {"precision": {"level": "O3"}})
    late = PlanRequest(job=job, levels=("te",))

    async def plans() -> list[Plan]:
        planner = Planner(settings.model_copy(update={"planner": True}))
        try:
            first = await planner.plan(PlanRequest(job=job, levels=("O2",)))
            lost = asyncio.create_task(planner.plan(PlanRequest(job=other, levels=("O3",))))
            while not planner._keys:
                await asyncio.sleep(0.001)
            assert planner._process is not None
            planner._process.kill()
            found = [first, await lost]
            monkeypatch.setattr(planning, "DEADLINE_S", 0.01)
            found += [await planner.plan(late), await planner.plan(late)]
            while planner._waiting:
                await asyncio.sleep(0.01)
            assert next(planner._numbers) == 3
            return [*found, await planner.plan(PlanRequest(job=job, levels=("O2", "te")))]
        finally:
            await planner.close()

    first, lost, early, asked_again, again = asyncio.run(plans())
    (row,) = first.rows
    assert row.peak_bytes is not None, row.reason
    assert row.peak_bytes > sum((row.states or {}).values()) / 2
    assert row.states_agree is True
    assert row.fits[0].verdict == "yes"
    assert "ended with status" in (lost.rows[0].reason or "")
    for plan in (early, asked_again):
        assert "not traced within" in (plan.rows[0].reason or "")
    assert {each.level: each.peak_bytes is not None for each in again.rows} == {"O2": True, "te": True}
