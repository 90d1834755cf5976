"""A plan: the bytes that a job takes on a rank at each level, the pools that it fits, and what would make it fit.

States and bytes sent are closed forms (`planned_states.py`). The peak comes from a process with torch
(`octet.worker.planning`), which the caller asks between `candidates` and `plan_of`. The bounds add what no tensor holds: to the
lower one nothing, to the upper one the largest published sizes of fragmentation, CUDA's context and NCCL's buffers.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field, ValidationError

from octet.api_schemas.base import Contract, SpecConflict
from octet.api_schemas.data.files import Files
from octet.api_schemas.devices import DEVICES
from octet.api_schemas.job import JobSpec
from octet.api_schemas.job_plan import JobPlan, StepRange, Verdict
from octet.api_schemas.levels import AUTOMATIC, LEVELS
from octet.api_schemas.models import FamilySizes
from octet.api_schemas.models.huggingface import CountedSizes, HuggingFaceSizes, HuggingFaceSpec, NetworkShapes
from octet.api_schemas.nccl_buffers import nccl_bytes
from octet.api_schemas.optimization import MATRIX_STATES
from octet.api_schemas.peak import PEAK_CLASSES, Peak
from octet.api_schemas.planned_states import (
    NotPlanned,
    States,
    exchanged_of_experts,
    most_of,
    states_of_rank,
    states_of_ranks,
    why_left,
)
from octet.api_schemas.precision import LevelName
from octet.api_schemas.preset_peaks import preset_peak
from octet.api_schemas.problem import explain
from octet.api_schemas.resources import PoolConfig
from octet.api_schemas.step_floor import StepFloor, step_floor
from octet.api_schemas.step_prediction import step_prediction

FRAGMENTATION = 1.07
"""Reserved over allocated bytes, at worst over seven layouts of Llama 1 B on 8 to 64 H100 (nanotron's logs)."""
CONTEXT_BYTES = 700_000_000
"""CUDA's context and kernels, at most, with lazy loading (pytorch issue 107667)."""
SMALL_BYTES = 1 << 20
"""A trace rounds each tensor up as CUDA's allocator does, by up to 511 bytes, which in tiny models is more than the tensors."""
FP8_CAPABILITY = (8, 9)
TRACED_FAMILIES = ("gpt", "llama", "huggingface", "roberta", "deit", "swin")
NO_TRITON = "triton is not installed, which PyTorch's CPU build leaves out; pip install triton"
ONLY_STATES = "only states: ask for all peaks to have this one"


class PlanRequest(Contract):
    """A job, and the levels at which it is planned."""

    job: JobSpec
    levels: tuple[LevelName, ...] = Field(
        default=(),
        max_length=len(LEVELS),
        description="default: every level",
    )
    peaks: Literal["all", "own"] = Field(
        default="all",
        description="own: of the job's own level, or of auto's choices, and of those that the same traces serve; of others the "
        "states alone",
    )


class TraceRequest(Contract):
    """One line to the planner's process, which opens no file.

    pipeline_rank: whose stages are traced. config: the content of config.json in the model's folder, if it has one.
    """

    id: str
    job: JobSpec
    pipeline_rank: int = 0
    config: dict[str, Any] | None = None


_TRACED_PARTS = {"model", "adapter", "precision", "training", "parallelism", "resources"}
_NOT_TRACED: dict[str, Any] = {
    "training": {
        **dict.fromkeys(("steps", "epochs", "seed", "schedule", "eval_every", "eval_batches"), True),
        **dict.fromkeys(("checkpoint_every", "checkpoint_every_minutes", "keep"), True),
        **dict.fromkeys(("on_divergence", "collective_timeout_s", "attention_kernel"), True),
        "optimizer": {"learning_rate": True},
    },
    "resources": dict.fromkeys(("pool", "force", "min_workers", "max_slot_hours", "max_hours", "max_cost"), True),
}
"""Fields in which jobs with the same peak may differ: one trace serves a sweep over them."""


def trace_key(request: TraceRequest, *, any_depth: bool = False) -> str:
    """Return what requests share that one trace serves. any_depth: what those with the same traces share, of a family's sizes.

    Levels with the same passes share a trace, as their states have a closed form, unless the update decodes the states: in
    host memory, or of matrices to be orthogonalized.
    """
    packing = "packed" if request.job.data.is_packed else "not packed"
    job = request.job.model_dump(mode="json", include=_TRACED_PARTS, exclude=_NOT_TRACED)
    if _shares_traces(request.job):
        job["precision"]["level"] = request.job.precision.storage.passes
    if any_depth:
        job["model"] = [request.job.model.family, request.job.model.sizes.model_dump(mode="json", exclude={"num_layers"})]
    return json.dumps([request.pipeline_rank, packing, job, request.config], sort_keys=True)


def _shares_traces(job: JobSpec) -> bool:
    return not job.training.offload_optimizer and job.training.optimizer.name not in MATRIX_STATES


class TraceReply(Contract):
    """One line from the planner's process: the peak, or why there is none. network: of a model that transformers builds.

    more: another line follows, with what wider micro-batches take.
    """

    id: str
    more: bool = False
    peak: Peak | None = None
    reason: str | None = None
    network: NetworkShapes | None = None


class Fit(Contract):
    """The room of a job in a pool's devices. tight: between the bounds. unknown: it has room for the states alone."""

    pool: str
    memory_per_device_bytes: int
    verdict: Verdict
    free_bytes: int = Field(description="memory less the lower bound; negative if that is larger")
    upper_bytes: int | None = Field(default=None, description="the peak with what such devices take at most; null without one")
    largest_micro_batch: int | None = Field(description="by the upper bound; null until wider micro-batches are traced, too")
    floor: StepFloor | None = Field(default=None, description="the least time of a step; null if the pool names no device")
    predicted: StepRange | None = Field(
        default=None, description="the range of a step's time by published rates; null without a device, or a closed form"
    )


class StagePlan(Contract):
    """The stages of one rank of a pipeline. Those of ranks between the first and the last differ little: one is traced."""

    pipeline_rank: int
    num_blocks: int
    states: dict[str, int] = Field(description="held at the update, by class of memory_report")
    peak_bytes: int | None = Field(default=None, description="null where no peak is known, and of ranks that are not traced")


class PlanRow(Contract):
    """A job at a level, or with a change. Bytes are of the rank that holds most; of a pipeline each rank is planned."""

    level: LevelName
    change: str | None = Field(default=None, description="the field that differs from the job's")
    reason: str | None = Field(default=None, description="why the row, or its peak, is not known")
    possible: bool = Field(default=True, description="false if the job's options or its pool's devices rule the level out")
    converted_layers: int | None = Field(default=None, description="linear layers in FP8; null at levels that convert none")
    left_layers: dict[str, int] | None = Field(default=None, description="linear layers in 16 bits, by the reason")
    states: dict[str, int] | None = Field(default=None, description="held at the update, by class of memory_report")
    plain_bytes: int | None = Field(default=None, description="the part of states outside of converted layers")
    host_bytes: int | None = Field(default=None, description="optimizer states in host memory")
    sent_bytes: dict[str, dict[str, int]] | None = Field(
        default=None, description="gradients and weights sent to replicas in a step, by collective and dtype"
    )
    exchanged_bytes: dict[str, dict[str, dict[str, int]]] | None = Field(
        default=None,
        description="what tensor, context, pipeline and expert ranks send each other in a step, by axis, collective and dtype; "
        "counted with the peak, on its rank; of expert ranks for tokens that are routed evenly",
    )
    peak_bytes: int | None = None
    peak_by_class: dict[str, int] | None = Field(default=None, description=f"alive at the peak: {', '.join(PEAK_CLASSES)}")
    step_bytes: int | None = Field(default=None, description="peak less what is alive between steps: activations, gradients, …")
    lower_bytes: int | None = Field(default=None, description="the peak, or the states where no peak is known")
    upper_bytes: int | None = Field(default=None, description="the peak with the largest published overheads of GPUs")
    overhead_bytes: dict[str, int] | None = Field(
        default=None,
        description="upper_bytes less lower_bytes: framework (CUDA's context and kernels), communication (NCCL), fragmentation",
    )
    states_agree: bool | None = Field(default=None, description="the trace holds what the closed form says")
    stages: tuple[StagePlan, ...] = Field(default=(), description="the ranks of a pipeline; empty without one")
    fits: tuple[Fit, ...] = ()


class Plan(Contract):
    """A job's plan. changes: single changes with which it would fit its pool, cheapest first; only asked for if it does not."""

    object: Literal["plan"] = "plan"
    pool: str
    workers: int
    micro_batch_size: int
    chosen_level: LevelName | None = Field(
        default=None,
        description="the choice of precision.level auto among these rows; null at another level, or if none is sure",
    )
    rows: tuple[PlanRow, ...]
    changes: tuple[PlanRow, ...] = ()
    missing: tuple[str, ...] = Field(default=(), description="settings of the pool without which parts of the plan are null")


class Candidate(NamedTuple):
    """A job that a row is about. spec: None if it cannot be, with the reason. wants_peak: trace it."""

    level: LevelName
    change: str | None
    spec: JobSpec | None
    reason: str | None
    wants_peak: bool


def candidates(request: PlanRequest, pool: PoolConfig | None = None) -> list[Candidate]:
    """Return the job at every level that was asked for. pool: the job's, whose devices may lack FP8."""
    own = request.job.precision.level
    names = request.levels or get_args(LevelName)
    traced = names if request.peaks == "all" else AUTOMATIC if own == "auto" else (own,)
    served = {LEVELS[name].passes for name in traced} if _shares_traces(request.job) else set()
    return [_at_level(request.job, name, pool, name in traced or LEVELS[name].passes in served) for name in names]


def _at_level(job: JobSpec, level: LevelName, pool: PoolConfig | None, wants_peak: bool) -> Candidate:
    capability = None if pool is None else pool.min_compute_capability
    if LEVELS[level].gemm == "fp8" and capability is not None and capability < FP8_CAPABILITY:
        return Candidate(level, None, None, f"the devices of pool {pool and pool.name} may have no FP8 units", False)
    if level == job.precision.level:
        return Candidate(level, None, job, None, wants_peak)
    return _changed(job, level, None, {"precision": {"level": level}}, wants_peak)


def candidates_of_job(job: JobSpec, pool: PoolConfig) -> list[Candidate]:
    """Return the job at its level or, at auto, at each level among which auto chooses, the most precise first."""
    own = job.precision.level
    return candidates(PlanRequest(job=job, levels=AUTOMATIC if own == "auto" else (own,)), pool)  # type: ignore[arg-type]


def savings_of_job(job: JobSpec, pool: PoolConfig) -> list[Candidate]:
    """Return the job at each other level among which auto chooses, then with each change. job: at one level."""
    others = [name for name in AUTOMATIC if name != job.precision.level]
    found = candidates(PlanRequest(job=job, levels=others), pool) + changes_of(job)  # type: ignore[arg-type]
    return [each for each in found if each.spec is not None and not (each.change and each.level != job.precision.level)]


def changes_of(job: JobSpec) -> list[Candidate]:
    """Return the job with each single change that may save memory and that its rules allow, cheapest in time first.

    A job at level auto, which is not chosen, has none.
    """
    own = job.precision.level
    if own == "auto":
        return []
    found = [_changed(job, own, _written(change), change, True) for change in _changes(job)]
    return [candidate for candidate in found if candidate.spec is not None and candidate.spec != job]


def _changes(job: JobSpec) -> Iterator[dict[str, dict[str, Any]]]:
    workers, zero_stage = job.resources.workers, job.parallelism.zero_stage
    yield {"training": {"fused_loss": True}}
    if workers > 1 and zero_stage < 1:
        yield {"parallelism": {"zero_stage": 1}}
    yield {"precision": {"level": "O2-8bit"}}
    yield {"training": {"saved_activations": "fp8"}}
    yield {"training": {"micro_batch_size": 1}}
    yield {"training": {"activation_checkpointing": "full"}}
    if workers > 1 and zero_stage < 3:
        yield {"parallelism": {"zero_stage": 3}}
    yield {"resources": {"workers": 2 * workers}, "parallelism": {"zero_stage": max(1, zero_stage)}}


def _written(change: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{part}.{name} {value}" for part, fields in change.items() for name, value in fields.items())


def _changed(
    job: JobSpec, level: LevelName, label: str | None, change: Mapping[str, Mapping[str, Any]], wants_peak: bool
) -> Candidate:
    document = job.model_dump(mode="json", exclude_unset=True)
    for part, fields in change.items():
        document[part] = {**document.get(part, {}), **fields}
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        violation = explain(error, JobSpec)[0]
        reason = f"{violation.field}: got {violation.got}; allowed: {violation.allowed}. {violation.message}"
        return Candidate(level, label, None, reason, False)
    return Candidate(spec.precision.level, label, spec, None, wants_peak)  # type: ignore[arg-type]


def why_not_traced(job: JobSpec) -> str | None:
    """Return why a job's step does not run on a fake GPU, at whatever level it is; None if it does."""
    if job.model.family not in TRACED_FAMILIES:
        return f"steps of family {job.model.family} are not traced; those of {', '.join(TRACED_FAMILIES)} are"
    if job.parallelism.expert > 1:
        return "steps of expert ranks are not traced: which tokens they exchange depends on values"
    return None


def ranks_to_trace(job: JobSpec) -> tuple[int, ...]:
    """Return the ranks of the pipeline axis whose steps are traced: the first, one between, and the last.

    That between is the one with the most blocks in flight. Earlier ranks keep more micro-batches, later ones may have a block
    more.
    """
    last, layout = job.layout.pipeline - 1, job.layout
    num_layers: int = getattr(job.model.sizes, "num_layers", 1)
    between = max(range(1, last), key=lambda rank: (last + 1 - rank) * layout.num_blocks_of(rank, num_layers), default=0)
    return tuple(sorted({0, between, last}))


def traces_of(found: Sequence[Candidate], first: str | None = None) -> list[TraceRequest]:
    """Return the requests to the planner's process, for peaks that are not shipped. first: the level that comes before others.

    Their ids are the candidates' indices and the ranks of the pipeline. Those with one `trace_key` need one trace.
    """
    requests = [
        TraceRequest(id=f"{index}.{rank}", job=candidate.spec, pipeline_rank=rank)
        for index, candidate in enumerate(found)
        if candidate.spec is not None and candidate.wants_peak and why_not_traced(candidate.spec) is None
        if preset_peak(candidate.spec) is None
        for rank in ranks_to_trace(candidate.spec)
    ]
    return sorted(requests, key=lambda request: request.job.precision.level != first)


def being_traced(requests: Sequence[TraceRequest]) -> dict[str, TraceReply]:
    """Return what stands for the replies to requests, by their ids, until they come."""
    return {request.id: TraceReply(id=request.id, reason="its peak is being traced") for request in requests}


def read_configs(requests: Sequence[TraceRequest], files: Files) -> tuple[list[TraceRequest], list[TraceReply]]:
    """Return the requests with what config.json says in models' folders, and replies to those whose folder cannot be read."""
    readable, replies = [], []
    for request in requests:
        model = request.job.model
        if not isinstance(model, HuggingFaceSpec) or model.path is None:
            readable.append(request)
            continue
        try:
            readable.append(request.model_copy(update={"config": model.read_config(files)}))
        except (SpecConflict, OSError) as error:
            replies.append(TraceReply(id=request.id, reason=f"its folder is not read: {error}"))
    return readable, replies


def rows_of(found: Sequence[Candidate], pools: Sequence[PoolConfig], replies: Sequence[TraceReply]) -> list[PlanRow]:
    """Return the rows of candidates. replies: to the requests of `traces_of`."""
    by_candidate: list[dict[int, TraceReply]] = [{} for _ in found]
    for reply in replies:
        index, rank = map(int, reply.id.split("."))
        by_candidate[index][rank] = reply
    traced = [
        (candidate.spec.model, reply.network)
        for candidate, of_ranks in zip(found, by_candidate, strict=True)
        for reply in of_ranks.values()
        if candidate.spec is not None and reply.network is not None and not reply.network.is_of_level
    ]
    rows = []
    for candidate, of_ranks in zip(found, by_candidate, strict=True):
        own = None if candidate.spec is None else candidate.spec.model
        shared = next((network for model, network in traced if model == own), None)
        rows.append(_row(candidate, pools, of_ranks, shared))
    return rows


def row_of(index: int, found: Sequence[Candidate], pools: Sequence[PoolConfig], replies: Sequence[TraceReply]) -> PlanRow:
    """Return one candidate's row, as `rows_of` does if no trace had to look at its network."""
    own = [
        reply.model_copy(update={"id": f"0.{rank}"})
        for reply in replies
        for at, rank in [reply.id.split(".")]
        if at == str(index)
    ]
    return rows_of([found[index]], pools, own)[0]


def _row(
    candidate: Candidate, pools: Sequence[PoolConfig], replies: Mapping[int, TraceReply], network: NetworkShapes | None
) -> PlanRow:
    """Return a candidate's row. replies: by the rank of the pipeline. network: as the trace of another level has found it."""
    row = PlanRow(level=candidate.level, change=candidate.change, reason=candidate.reason)
    spec = candidate.spec
    if spec is None:
        return row.model_copy(update={"possible": False})
    if not replies and (shipped := preset_peak(spec)) is not None:
        replies = {0: TraceReply(id="shipped", peak=shipped)}
    missing = next((reply.reason for reply in replies.values() if reply.reason is not None), None)
    sizes = sizes_with(spec, next((reply.network for reply in replies.values()), None) or network)
    try:
        ranks = states_of_ranks(spec, sizes)
    except NotPlanned as error:
        return row.model_copy(update={"reason": missing or str(error)})
    replies = {rank: _with_states(reply, spec, sizes, rank, ranks[rank]) for rank, reply in replies.items()}
    states, peak = most_of(ranks), _peak_of_ranks(replies)
    reason = (candidate.wants_peak and why_not_traced(spec)) or ONLY_STATES
    lower = sum(states.held.values()) if peak is None else max(peak.bytes, sum(states.held.values()))
    outside = {"framework": CONTEXT_BYTES, "communication": nccl_bytes(spec.layout, spec.parallelism)}
    overhead = sum(outside.values())
    found = {
        "reason": missing if replies else reason,
        **_layers(spec, sizes),
        "states": states.held,
        "plain_bytes": states.plain,
        "host_bytes": states.host,
        "sent_bytes": states.sent,
        "peak_bytes": None if peak is None else peak.bytes,
        "exchanged_bytes": exchanged_of_experts(spec, sizes) if peak is None else peak.exchanged,
        "peak_by_class": None if peak is None else peak.by_class,
        "step_bytes": None if peak is None else peak.bytes - peak.before,
        "lower_bytes": lower,
        "upper_bytes": None if peak is None else _upper(lower, overhead),
        "overhead_bytes": None if peak is None else outside | {"fragmentation": _upper(lower, 0) - lower},
        "states_agree": None
        if peak is None
        else all(_agrees(ranks[rank], reply.peak, sizes) for rank, reply in replies.items() if reply.peak is not None),
        "stages": _stages(spec, ranks, replies) if spec.layout.pipeline > 1 else (),
        "fits": tuple(
            _fit(pool, lower, 0 if pool.accelerator == "cpu" else overhead, peak, spec).model_copy(
                update={
                    "floor": step_floor(spec, sizes, states, pool),
                    "predicted": step_prediction(spec, sizes, states, pool, None if peak is None else peak.exchanged),
                }
            )
            for pool in pools
            if pool.memory_per_device_bytes is not None
        ),
    }
    return row.model_copy(update=found)


def _with_states(reply: TraceReply, spec: JobSpec, sizes: FamilySizes, rank: int, states: States) -> TraceReply:
    """Return a reply whose peak holds a job's states, which may have been traced at another level with the same passes."""
    if reply.peak is None or reply.peak.level == spec.precision.level:
        return reply
    precision = spec.precision.model_copy(update={"level": reply.peak.level})
    own = states_of_rank(spec.model_copy(update={"precision": precision}), sizes, rank).held
    return reply.model_copy(update={"peak": reply.peak.with_states(own, states.held)})


def _peak_of_ranks(replies: Mapping[int, TraceReply]) -> Peak | None:
    """Return the largest peak of a job's ranks, whose micro-batch must fit all of them; None unless all are known."""
    peaks = [reply.peak for reply in replies.values() if reply.peak is not None]
    if not peaks or len(peaks) < len(replies):
        return None
    lines = tuple(line for peak in peaks for line in peak.by_micro_batch) if all(peak.by_micro_batch for peak in peaks) else ()
    return max(peaks, key=lambda peak: peak.bytes).model_copy(update={"by_micro_batch": lines})


def _stages(spec: JobSpec, ranks: Sequence[States], replies: Mapping[int, TraceReply]) -> tuple[StagePlan, ...]:
    num_layers: int = getattr(spec.model.sizes, "num_layers", 1)
    peaks = {rank: reply.peak for rank, reply in replies.items() if reply.peak is not None}
    return tuple(
        StagePlan(
            pipeline_rank=rank,
            num_blocks=spec.layout.num_blocks_of(rank, num_layers),
            states=states.held,
            peak_bytes=peaks[rank].bytes if rank in peaks else None,
        )
        for rank, states in enumerate(ranks)
    )


def sizes_with(spec: JobSpec, network: NetworkShapes | None) -> FamilySizes:
    """Return the model's sizes, of a network of transformers with the parameters that a trace has found."""
    sizes = spec.model.sizes
    if network is None or not isinstance(sizes, HuggingFaceSizes):
        return sizes
    return CountedSizes(**dict(sizes), network=network)


def _layers(spec: JobSpec, sizes: FamilySizes) -> dict[str, Any]:
    """Return the fields about the layers that a job's level converts. A GPU's table of speedups may leave more in bf16."""
    shapes = sizes.parameters() if spec.precision.storage.gemm == "fp8" else None
    if shapes is None:
        return {}
    reasons = Counter(why_left(list(shapes), spec.resolved_precision).values())
    return {"converted_layers": reasons.pop(None, 0), "left_layers": reasons}


def _agrees(states: States, peak: Peak, sizes: FamilySizes) -> bool:
    """Return True if all classes but `other` are equal within 0.5 %, and if nothing else is alive between steps.

    `other` has an optimizer's counters on a GPU. Gradients are alive at the update, where classes are counted. The scales of
    experts' gradients are 16 bytes apart, which counts where a level has no other scales.
    """
    has_experts = getattr(sizes, "num_experts_per_token", None) is not None
    most_of_scales = 16 / 4 - 1 if has_experts else 0.005
    alive = sum(num_bytes for kind, num_bytes in peak.held.items() if kind != "gradients")
    return abs(peak.before - alive) <= 0.005 * alive + SMALL_BYTES and all(
        -0.005 * num_bytes <= peak.held[kind] - num_bytes <= (most_of_scales if kind == "scales" else 0.005) * num_bytes
        for kind, num_bytes in states.held.items()
        if kind != "other"
    )


def _upper(lower: int, overhead: int) -> int:
    return round(lower * FRAGMENTATION) + overhead


def _fit(pool: PoolConfig, lower: int, overhead: int, peak: Peak | None, spec: JobSpec) -> Fit:
    """Compare a job with a pool's devices. overhead: what their driver and its collectives take at most."""
    memory, largest = pool.memory_per_device_bytes, None
    assert memory is not None
    verdict: Verdict = "no" if lower > memory else "unknown"
    upper = None if peak is None else _upper(lower, overhead)
    if peak is not None and upper is not None:
        verdict = verdict if verdict == "no" else "yes" if upper <= memory else "tight"
        largest = peak.largest_micro_batch(spec.batch.micro_batch_size, int((memory - overhead) / FRAGMENTATION))
    return Fit(
        pool=pool.name,
        memory_per_device_bytes=memory,
        verdict=verdict,
        free_bytes=memory - lower,
        upper_bytes=upper,
        largest_micro_batch=largest,
    )


def fits(row: PlanRow, pool: str) -> Verdict:
    """Return a row's verdict on a pool; "unknown" for one whose memory is not configured."""
    fit = room(row, pool)
    return "unknown" if fit is None else fit.verdict


def room(row: PlanRow, pool: str) -> Fit | None:
    """Return a row's room in a pool; None where that states no memory, or the row has no bytes."""
    return next((fit for fit in row.fits if fit.pool == pool), None)


def choose_level(rows: Sequence[PlanRow], pool: str) -> PlanRow | None:
    """Return the row that precision.level auto takes: the first that fits, or else that with the largest micro-batch.

    rows: of `AUTOMATIC`, or some of them, in its order; those that their states alone exclude need no peak. None if a row
    without a peak comes before one that fits: it may be the better choice. None, too, if micro-batches are not known yet.
    """
    known = [row for row in rows if row.possible]
    for row in known:
        verdict = fits(row, pool)
        if verdict == "yes":
            return row
        if verdict == "unknown":
            return None

    if any(fit.upper_bytes is not None and fit.largest_micro_batch is None for row in known if (fit := room(row, pool))):
        return None

    def largest(row: PlanRow) -> tuple[int, int]:
        fit = room(row, pool)
        return (fit and fit.largest_micro_batch) or 0, -(row.lower_bytes or 0)

    return max(known, key=largest, default=None)


def job_plan(job: JobSpec, pool: PoolConfig, rows: Sequence[PlanRow], version: str) -> JobPlan:
    """Return the plan that is stored with a job. rows: of `candidates_of_job`."""
    assert pool.memory_per_device_bytes is not None, "jobs of other pools are not planned"
    asked = job.precision.level
    row = choose_level(rows, pool.name) if asked == "auto" else rows[0]
    fit = None if row is None else room(row, pool.name)
    verdict: Verdict = "unknown" if fit is None else fit.verdict
    unknown = rows if row is None else [row]
    reasons = [f"{each.level}: {each.reason}" for each in unknown if each.reason and fits(each, pool.name) == "unknown"]
    plan = JobPlan(
        asked_level=asked,
        level=asked if asked != "auto" else None if row is None else row.level,
        verdict=verdict,
        reason="; ".join(reasons)[:1000] or None,
        memory_per_device_bytes=pool.memory_per_device_bytes,
        micro_batch_size=job.batch.micro_batch_size,
        largest_micro_batch=None if fit is None else fit.largest_micro_batch,
        upper_bytes=None if fit is None else fit.upper_bytes,
        predicted_step=None if fit is None else fit.predicted,
        planner_version=version,
    )
    if row is None:
        return plan
    return plan.model_copy(update={name: getattr(row, name) for name in _PLANNED_BYTES})


_PLANNED_BYTES = ("states", "peak_bytes", "lower_bytes", "states_agree")


def not_planned(job: JobSpec, pool: PoolConfig, reason: str, version: str) -> JobPlan:
    """Return the plan of a job about which nothing is known. reason: why."""
    level = AUTOMATIC[0] if job.precision.level == "auto" else job.precision.level
    return job_plan(job, pool, [PlanRow(level=level, reason=reason)], version)  # type: ignore[arg-type]


def with_remedies(plan: JobPlan, job: JobSpec, pool: PoolConfig, rows: Sequence[PlanRow]) -> JobPlan:
    """Add what would make a job fit. rows: of `savings_of_job`, whose job has the plan's level."""
    num_sequences = job.training.global_batch_size // job.batch.num_data_ranks
    possible = [size for size in range(plan.largest_micro_batch or 0, 0, -1) if num_sequences % size == 0]
    sure = [f"training.micro_batch_size {size}" for size in possible[:1] if size < plan.micro_batch_size]
    named = [(fits(row, pool.name), row.change or f"precision.level {row.level}") for row in rows]
    sure += [name for verdict, name in named if verdict == "yes"]
    maybe = [] if sure else [name for verdict, name in named if verdict in ("tight", "unknown")]
    return plan.model_copy(update={"remedies": tuple(sure), "possible_remedies": tuple(maybe)})


def needs_changes(job: JobSpec, rows: Sequence[PlanRow]) -> bool:
    """Return True if the job, as it is, may not fit its pool."""
    own = [row for row in rows if row.level == job.precision.level]
    return any(fits(row, job.resources.pool) in ("no", "tight") for row in own)


def missing_in(pool: PoolConfig) -> tuple[str, ...]:
    """Return what a pool's configuration lacks for a whole plan, and what to set."""
    found = []
    if pool.memory_per_device_bytes is None:
        found.append(f"pool {pool.name!r} states no memory: set its memory_per_device_bytes to see if jobs fit, and times")
    if pool.device is None and pool.accelerator == "cuda":
        found.append(f"pool {pool.name!r} names no device: set its device to one of {', '.join(DEVICES)} to see times")
    return tuple(found)


def plan_of(job: JobSpec, rows: Sequence[PlanRow], changes: Sequence[PlanRow], missing: Sequence[str] = ()) -> Plan:
    """Put a plan together. changes: as far as they were planned; those that do not fit are left out."""
    pool = job.resources.pool
    automatic = [row for row in rows if row.level in AUTOMATIC]
    chosen = choose_level(automatic, pool) if job.precision.level == "auto" else None
    return Plan(
        pool=pool,
        workers=job.resources.workers,
        micro_batch_size=job.batch.micro_batch_size,
        chosen_level=None if chosen is None else chosen.level,
        rows=tuple(rows),
        changes=tuple(row for row in changes if fits(row, pool) == "yes"),
        missing=tuple(missing),
    )
