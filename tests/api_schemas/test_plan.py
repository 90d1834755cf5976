"""Plans: which levels and changes are rows, the bounds, and that more memory never fits fewer jobs."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octet.api_schemas import JobSpec
from octet.api_schemas.job_plan import JobPlan
from octet.api_schemas.levels import AUTOMATIC, LEVELS
from octet.api_schemas.nccl_buffers import nccl_bytes
from octet.api_schemas.peak import PEAK_CLASSES, Peak, PeakLine
from octet.api_schemas.plan import (
    FRAGMENTATION,
    PlanRequest,
    PlanRow,
    TraceReply,
    TraceRequest,
    candidates,
    candidates_of_job,
    changes_of,
    job_plan,
    needs_changes,
    plan_of,
    rows_of,
    savings_of_job,
    trace_key,
    traces_of,
    with_remedies,
)
from octet.api_schemas.planned_states import states_of, states_of_rank
from octet.api_schemas.resources import PoolConfig

ORDER = ("no", "unknown", "tight", "yes")


def job(level: str = "O2", workers: int = 1, **parts: Any) -> JobSpec:
    document = {
        "name": "plan",
        "model": {"preset": "gpt-125m"},
        "precision": {"level": level},
        "data": {"source": "tokens", "path": "/data"},
        "training": {"steps": 1, "global_batch_size": 8 * workers, "sequence_length": 512},
        "resources": {"pool": "gpu", "workers": workers},
    }
    return JobSpec.model_validate(document | parts)


def pool(memory: int | None, capability: tuple[int, int] | None = None) -> PoolConfig:
    return PoolConfig(
        name="gpu", node_label=("pool", "gpu"), slots=8, memory_per_device_bytes=memory, min_compute_capability=capability
    )


def peak_of(spec: JobSpec, activations: int) -> Peak:
    held = states_of(spec, spec.model.sizes).held
    before = sum(held.values()) - held["gradients"]
    by_class = {**dict.fromkeys(PEAK_CLASSES, 0), **held, "gradients": 0}
    grows = {kind: activations if kind == "activations" else 0 for kind in PEAK_CLASSES}
    line = PeakLine(base=before, growth=activations, by_class=tuple((by_class[kind], grows[kind]) for kind in PEAK_CLASSES))
    return Peak(
        level=spec.precision.storage.name,
        bytes=before + activations,
        by_class=by_class | {"activations": activations},
        before=before,
        held=held,
        by_micro_batch=(line,),
    )


def rows(spec: JobSpec, memory: int | None, activations: int | None = None, **options: Any) -> list[PlanRow]:
    found = candidates(PlanRequest(job=spec, **options), pool(memory))
    replies = [TraceReply(id=each.id, peak=activations and peak_of(each.job, activations)) for each in traces_of(found)]
    return rows_of(found, [pool(memory)], replies)


def test_every_level_has_a_row_and_all_or_the_jobs_own_are_traced() -> None:
    every = traces_of(candidates(PlanRequest(job=job())), "O2")
    assert {request.job.precision.level for request in every} == {*LEVELS}
    assert len(set(map(trace_key, every))) == len(LEVELS) - 4
    found = candidates(PlanRequest(job=job(), peaks="own"))
    assert [each.level for each in found] == list(LEVELS)
    requests = traces_of(found, "O2")
    assert [request.job.precision.level for request in requests] == ["O2", "O1", "O2-8bit"]
    assert len(set(map(trace_key, requests))) == 1, "its trace serves two more"
    some = candidates(PlanRequest(job=job(), levels=("O3", "te")))
    assert [request.job.precision.level for request in traces_of(some)] == ["O3", "te"]


def test_rows_say_which_layers_are_converted() -> None:
    """GPT-125M has four linear layers in each of 12 blocks, and a head that is tied to the embedding."""
    spec = job(precision={"level": "O2", "exclude": ["blocks.0.*"]})
    by_level = {row.level: row for row in rows(spec, None)}
    assert by_level["O2"].converted_layers == 44
    head = "a head: its rounding error would go straight into the loss"
    assert by_level["O2"].left_layers == {"excluded by name": 4, head: 1}
    assert by_level["bf16-amp"].converted_layers is None
    tied = {row.level: row for row in rows(job(precision={"level": "O2", "convert_heads": True}), None)}["O2"]
    assert (tied.converted_layers, tied.left_layers) == (48, {"its weight is shared with another module": 1})


def test_a_level_that_a_job_or_a_pool_cannot_have_says_why() -> None:
    spec = job(workers=2, parallelism={"tensor": 2})
    by_level = {row.level: row for row in rows(spec, None)}
    assert "parallelism.tensor" in (by_level["fp16-amp"].reason or "")
    assert by_level["fp16-amp"].states is None
    old = {each.level: each.reason for each in candidates(PlanRequest(job=job()), pool(None, (8, 0)))}
    assert "no FP8 units" in (old["O3"] or "")
    assert old["bf16-amp"] is None


def test_a_peak_has_bounds_and_a_largest_micro_batch() -> None:
    spec, activations = job(), 4_000_000_000
    (row,) = [each for each in rows(spec, 24_000_000_000, activations) if each.level == "O2"]
    assert row.lower_bytes == row.peak_bytes
    assert row.upper_bytes is not None
    assert row.peak_bytes is not None
    assert row.upper_bytes > row.peak_bytes * FRAGMENTATION
    assert row.step_bytes == activations
    assert row.peak_by_class is not None
    assert (sum(row.peak_by_class.values()), row.peak_by_class["activations"]) == (row.peak_bytes, activations)
    assert row.overhead_bytes is not None
    assert row.overhead_bytes.keys() == {"framework", "communication", "fragmentation"}
    assert sum(row.overhead_bytes.values()) == row.upper_bytes - row.lower_bytes
    assert row.states_agree is True
    (fit,) = row.fits
    assert fit.verdict == "yes"
    assert fit.largest_micro_batch is not None
    before = row.peak_bytes - activations
    assert 8 <= fit.largest_micro_batch < (24_000_000_000 - before) / (activations / 8)
    (on_two,) = [each for each in rows(job(workers=2), 24_000_000_000, activations) if each.level == "O2"]
    of_two = job(workers=2)
    assert on_two.upper_bytes == row.upper_bytes + nccl_bytes(of_two.layout, of_two.parallelism)


def test_levels_share_a_trace_whose_steps_differ_by_their_states() -> None:
    def kinds(**training: Any) -> list[list[str]]:
        steps = {"steps": 1, "global_batch_size": 8, "sequence_length": 512}
        found: dict[str, list[str]] = {}
        for level in LEVELS:
            own_options = training if level[0] == "O" else {}
            key = trace_key(TraceRequest(id="0.0", job=job(level, training=steps | own_options)))
            found.setdefault(key, []).append(level)
        return [levels for levels in found.values() if len(levels) > 1]

    assert kinds() == kinds(optimizer={"name": "lion"}) == [["O1", "O2", "O2-8bit"], ["O3", "O3-split", "O3-split-8bit"]]
    assert kinds(offload_optimizer=True) == kinds(optimizer={"name": "muon"}) == []


@pytest.mark.parametrize("layout", [{}, {"workers": 4, "parallelism": {"zero_stage": 3}}], ids=["one rank", "ZeRO 3"])
def test_a_peak_holds_the_states_of_the_level_that_it_is_taken_for(layout: Any) -> None:
    for traced, others in (("O1", ("O2", "O2-8bit")), ("O3-split", ("O3", "O3-split-8bit"))):
        peak = peak_of(job(traced, **layout), 10**9)
        for level in others:
            spec = job(level, **layout)
            own, reply = peak_of(spec, 10**9), TraceReply(id="0.0", peak=peak)
            shared = peak.with_states(peak.held, own.held)
            assert shared == own.model_copy(update={"level": traced})
            assert own.bytes != peak.bytes
            (row,) = rows_of(candidates(PlanRequest(job=spec, levels=(level,))), [], [reply])
            assert (row.peak_bytes, row.peak_by_class, row.states_agree) == (own.bytes, own.by_class, True)
            wrong = peak.model_copy(update={"held": peak.held | {"weights": peak.held["weights"] * 2}})
            (row,) = rows_of(candidates(PlanRequest(job=spec, levels=(level,))), [], [reply.model_copy(update={"peak": wrong})])
            assert row.states_agree is False


def test_states_that_differ_from_the_trace_are_marked() -> None:
    spec = job()
    peak = peak_of(spec, 1)
    wrong = peak.model_copy(update={"held": peak.held | {"weights": peak.held["weights"] * 2}})
    found = candidates(PlanRequest(job=spec, levels=("O2",)))
    more = peak.model_copy(update={"before": peak.before + peak.held["weights"]})
    for traced in (wrong, more):
        (row,) = rows_of(found, [], [TraceReply(id="0.0", peak=traced)])
        assert row.states_agree is False
    o1 = peak_of(job("O1"), 1)
    padded = o1.model_copy(update={"held": o1.held | {"scales": 2 * o1.held["scales"]}})
    found = candidates(PlanRequest(job=job("O1"), levels=("O1",)))
    for traced, agrees in ((o1, True), (padded, False)):
        (row,) = rows_of(found, [], [TraceReply(id="0.0", peak=traced)])
        assert row.states_agree is agrees, "only scales of experts lie apart"


def test_each_rank_of_a_pipeline_is_planned_and_the_largest_decides() -> None:
    """GPT-125M has 12 blocks, which five ranks divide into 2, 2, 3, 2 and 3."""
    training = {"steps": 1, "global_batch_size": 8, "micro_batch_size": 1, "sequence_length": 1024}
    spec = job(workers=5, parallelism={"pipeline": 5}, training=training)
    found = candidates(PlanRequest(job=spec, levels=("O2",)))
    requests = traces_of(found)
    assert [request.pipeline_rank for request in requests] == [0, 2, 4], "3 blocks keep more than 2 for one micro-batch more"
    states = [states_of_rank(spec, spec.model.sizes, rank) for rank in range(5)]
    peaks = {
        rank: Peak(
            level="O2",
            bytes=sum(states[rank].held.values()) + activations,
            by_class=states[rank].held | {"activations": activations},
            before=sum(states[rank].held.values()) - states[rank].held["gradients"],
            held=states[rank].held,
            by_micro_batch=(PeakLine(base=10**8, growth=growth),),
        )
        for rank, activations, growth in ((0, 10**10, 10**9), (2, 10**9, 10**8), (4, 10**9, 2 * 10**9))
    }
    replies = [TraceReply(id=request.id, peak=peaks[request.pipeline_rank]) for request in requests]
    (row,) = rows_of(found, [pool(20 * 10**9)], replies)
    assert [stage.num_blocks for stage in row.stages] == [2, 2, 3, 2, 3]
    assert [stage.peak_bytes for stage in row.stages] == [peaks[rank].bytes if rank in peaks else None for rank in range(5)]
    assert (row.peak_bytes, row.states_agree) == (peaks[0].bytes, True)
    assert row.fits[0].largest_micro_batch == peaks[4].largest_micro_batch(1, int(20 * 10**9 / FRAGMENTATION))
    (without,) = rows_of(found, [], [*replies[:2], TraceReply(id=replies[2].id, reason="it was late")])
    assert (without.peak_bytes, without.reason) == (None, "it was late")


def test_changes_are_asked_for_only_if_the_job_may_not_fit_and_those_that_fit_are_shown() -> None:
    spec = job("bf16-amp", 2)
    assert not needs_changes(spec, rows(spec, None, 10**9))
    assert not needs_changes(spec, rows(spec, 80 * 10**9, 10**9))
    short = rows(spec, 2 * 10**9, 10**9)
    assert needs_changes(spec, short)
    changes = changes_of(spec)
    assert [each.change for each in changes[:3]] == [
        "training.fused_loss True",
        "parallelism.zero_stage 1",
        "precision.level O2-8bit",
    ]
    replies = [
        TraceReply(id=each.id, peak=peak_of(each.job, 10**8 if index == 1 else 10**12))
        for index, each in enumerate(traces_of(changes))
    ]
    plan = plan_of(spec, short, rows_of(changes, [pool(8 * 10**9)], replies))
    assert [row.change for row in plan.changes] == ["parallelism.zero_stage 1"]


@given(
    memories=st.tuples(st.integers(10**6, 10**12), st.integers(10**6, 10**12)),
    activations=st.one_of(st.none(), st.integers(1, 10**11)),
    workers=st.integers(1, 8),
)
def test_more_memory_never_fits_fewer(memories: tuple[int, int], activations: int | None, workers: int) -> None:
    spec = job(workers=workers)
    less, more = (rows(spec, memory, activations, levels=("O2",))[0].fits[0] for memory in sorted(memories))
    assert ORDER.index(less.verdict) <= ORDER.index(more.verdict)
    assert less.free_bytes <= more.free_bytes
    assert (less.largest_micro_batch or 0) <= (more.largest_micro_batch or 0)


def test_a_model_that_only_a_rank_knows_has_rows_with_the_reason() -> None:
    spec = job(model={"family": "huggingface", "architecture": "llama", "config": {"vocab_size": 512}})
    assert all("family huggingface" in (row.reason or "") for row in rows(spec, 10**9, levels=("O2",)))


@pytest.mark.parametrize("workers", [1, 2])
def test_changes_are_jobs_of_their_own(workers: int) -> None:
    for change in changes_of(job(workers=workers)):
        assert change.spec is not None
        assert change.spec != job(workers=workers)


PEAKS = st.dictionaries(st.sampled_from(AUTOMATIC), st.integers(1, 3 * 10**10), min_size=len(AUTOMATIC))
NEAR = st.tuples(st.sampled_from(AUTOMATIC), st.integers(-(10**9), 3 * 10**9))
"""A level, and how much more memory a device has than the level's lower bound: between the bounds, too."""


def memory_near(near: tuple[str, int], activations: dict[str, int]) -> int:
    level, more = near
    return max(10**8, (planned(job(level), 10**12, activations).lower_bytes or 0) + more)


def planned(spec: JobSpec, memory: int, activations: dict[str, int]) -> JobPlan:
    """Plan a job whose peaks at these levels are known."""
    found = candidates_of_job(spec, pool(memory))
    requests = [each for each in traces_of(found) if each.job.precision.level in activations]
    replies = [TraceReply(id=each.id, peak=peak_of(each.job, activations[each.job.precision.level])) for each in requests]
    return job_plan(spec, pool(memory), rows_of(found, [pool(memory)], replies), "1")


@settings(max_examples=20)
@given(near=NEAR, activations=PEAKS)
def test_auto_takes_the_most_precise_level_that_surely_fits(near: tuple[str, int], activations: dict[str, int]) -> None:
    memory = memory_near(near, activations)
    at = {level: planned(job(level), memory, activations) for level in AUTOMATIC}
    chosen = planned(job("auto"), memory, activations)
    surely = [level for level, plan in at.items() if plan.verdict == "yes"]
    assert chosen.level is not None
    if surely:
        assert (chosen.level, chosen.verdict) == (surely[0], "yes")
        assert chosen.upper_bytes is not None
        assert chosen.upper_bytes <= memory
    else:
        assert chosen.largest_micro_batch == max(plan.largest_micro_batch or 0 for plan in at.values())
        assert chosen.verdict in ("tight", "no")
    assert chosen.model_copy(update={"asked_level": chosen.level}) == at[chosen.level]


@settings(max_examples=20)
@given(near=st.tuples(NEAR, NEAR), activations=PEAKS)
def test_more_memory_never_makes_auto_less_precise(
    near: tuple[tuple[str, int], tuple[str, int]], activations: dict[str, int]
) -> None:
    less, more = (
        planned(job("auto"), memory, activations) for memory in sorted(memory_near(each, activations) for each in near)
    )
    assert less.level is not None
    assert more.level is not None
    assert ORDER.index(less.verdict) <= ORDER.index(more.verdict)
    if less.verdict == "yes":
        assert AUTOMATIC.index(more.level) <= AUTOMATIC.index(less.level)


def test_auto_makes_no_choice_past_a_level_whose_peak_is_not_known() -> None:
    """A late trace must not make a job less precise than another run of the same plan would."""
    known = dict.fromkeys(AUTOMATIC[1:], 1)
    assert planned(job("auto"), 10**11, known).level is None
    too_small_for_bf16_states = 10**9
    assert planned(job("auto"), too_small_for_bf16_states, known).level in AUTOMATIC[2:]


def test_auto_passes_over_levels_that_the_devices_or_the_job_cannot_have() -> None:
    old = pool(10**11, (8, 0))
    found = candidates_of_job(job("auto"), old)
    assert [each.level for each in found if each.spec is not None] == ["bf16-amp"]


def test_a_job_that_does_not_fit_hears_what_would() -> None:
    spec, memory = job("bf16-amp"), 10**10
    plan = planned(spec, memory, {"bf16-amp": 4 * 10**10})
    assert plan.verdict == "no"
    savings = savings_of_job(spec, pool(memory))
    assert [each.change for each in savings][: len(AUTOMATIC) - 1] == [None] * (len(AUTOMATIC) - 1)
    replies = [
        TraceReply(id=each.id, peak=peak_of(each.job, 10**8 if each.job.training.fused_loss else 10**12))
        for each in traces_of(savings)
    ]
    found = with_remedies(plan, spec, pool(memory), rows_of(savings, [pool(memory)], replies))
    assert found.remedies == ("training.micro_batch_size 1", "training.fused_loss True")
    assert found.possible_remedies == ()
    by_states = with_remedies(
        plan.model_copy(update={"largest_micro_batch": 0}), spec, pool(memory), rows_of(savings, [pool(memory)], ())
    )
    assert by_states.remedies == ()
    assert "precision.level O2" in by_states.possible_remedies


def test_a_plan_of_auto_names_its_choice() -> None:
    spec = job("auto")
    found = rows(spec, 80 * 10**9, 10**9, peaks="own")
    traced = {row.level for row in found if row.peak_bytes is not None}
    assert traced == {*AUTOMATIC, "O3"}, "the trace of O3-split serves O3"
    assert plan_of(spec, found, ()).chosen_level == "bf16-amp"
    assert plan_of(spec, rows(spec, None, 10**9), ()).chosen_level is None
