"""The options of `parallelize` that divide a model over ranks, apart from ZeRO, and which of them go together."""

from typing import TypedDict

from torch import nn

from api_schemas.levels import LEVELS
from api_schemas.resources import PipelineSchedule
from worker.fp8.convert import ConversionReport

SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved")


class Degrees(TypedDict, total=False):
    """What `parallelize` documents: tensor, context, pipeline are 1 by default, sequence is False.

    micro_batches: 1 without a pipeline, which needs it. schedule: 1f1b. stages_per_rank: 1, and 2 with interleaved. blocks: of
    models that are not ours.
    """

    tensor: int
    sequence: bool
    context: int
    pipeline: int
    micro_batches: int
    schedule: str
    stages_per_rank: int
    blocks: str


def checked(degrees: Degrees, zero_stage: int) -> Degrees:
    """Return all options with their values. Raises TypeError for another option, and ValueError for what does not fit."""
    if unknown := degrees.keys() - Degrees.__annotations__.keys():
        raise TypeError(
            f"parallelize got {sorted(unknown)[0]!r}; allowed: zero_stage, wide_communication, group, plan, "
            f"{', '.join(Degrees.__annotations__)}. Correct the name, or leave it out."
        )
    tensor, pipeline = degrees.get("tensor", 1), degrees.get("pipeline", 1)
    if degrees.get("sequence", False) and tensor == 1:
        raise ValueError(
            "sequence is set and tensor is 1; allowed: a tensor degree of 2 or more, whose ranks divide the tokens. Set "
            "tensor, or leave sequence out."
        )
    if (number := degrees.get("micro_batches", 1)) < 1:
        raise ValueError(f"micro_batches is {number}; allowed: 1 or more. Change it, or leave it out.")
    _check_schedule(degrees)
    if pipeline != 1:
        _check_pipeline(degrees, zero_stage)
    elif given := [name for name in ("schedule", "stages_per_rank", "blocks") if name in degrees]:
        raise ValueError(f"{given[0]} is set and pipeline is 1; allowed: 2 or more. Set pipeline, or leave {given[0]} out.")
    found: Degrees = {"tensor": 1, "sequence": False, "context": 1, "pipeline": 1, "micro_batches": 1, "schedule": "1f1b"}
    default: Degrees = {"stages_per_rank": 2 if degrees.get("schedule") == "interleaved" else 1}
    return found | default | degrees


def check_level(model: nn.Module) -> None:
    """Raise ValueError for a model of a level that has not been proven in stages."""
    report = getattr(model, "octet_report", None)
    if isinstance(report, ConversionReport) and LEVELS[report.level].engine == "torchao":
        raise ValueError(
            f"the model is at level {report.level}; allowed with pipeline: every other level, since torchao's layers have not "
            "been proven there. Use te."
        )


def _check_schedule(degrees: Degrees) -> None:
    schedule = degrees.get("schedule", "1f1b")
    if schedule == "zero-bubble":
        raise ValueError(
            "schedule is zero-bubble; allowed: 1f1b, interleaved. zero-bubble computes the gradients of inputs and of weights "
            "apart, which an FP8 layer computes in one pass, and leaves out the hooks that hold gradients in FP8. Use "
            "interleaved."
        )
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; allowed: {', '.join(SCHEDULES)}. Use one of these.")


def _check_pipeline(degrees: Degrees, zero_stage: int) -> None:
    pipeline, schedule = degrees["pipeline"], degrees.get("schedule", "1f1b")
    if pipeline < 1:
        raise ValueError(f"pipeline is {pipeline}; allowed: 1, or a divisor of the ranks. Change it.")
    if (context := degrees.get("context", 1)) != 1:
        raise ValueError(
            f"context is {context} and pipeline {pipeline}; allowed with pipeline: tensor, sequence, data parallel ranks and "
            "zero_stage 0 or 1. Set one of the two to 1; sequence also divides tokens."
        )
    if zero_stage > 1:
        raise ValueError(
            f"zero_stage is {zero_stage} and pipeline {pipeline}; allowed with pipeline: 0 or 1, since stages 2 and 3 would "
            "exchange gradients, or gather weights, for each micro-batch. Lower it, or set pipeline to 1."
        )
    if "micro_batches" not in degrees:
        raise ValueError(
            f"pipeline is {pipeline} and micro_batches is not set; allowed: {_allowed_micro_batches(pipeline, schedule)}, into "
            f"which each batch is divided. Set it: with {4 * pipeline} ranks compute about four fifths of the time."
        )
    number = degrees["micro_batches"]
    if number < pipeline or (schedule == "interleaved" and number % pipeline):
        raise ValueError(
            f"micro_batches is {number}, pipeline {pipeline} and schedule {schedule}; allowed: "
            f"{_allowed_micro_batches(pipeline, schedule)}. Change micro_batches or pipeline."
        )
    num_runs = degrees.get("stages_per_rank")
    if (num_runs is not None and (num_runs == 1) != (schedule == "1f1b")) or (num_runs is not None and num_runs < 1):
        raise ValueError(
            f"stages_per_rank is {num_runs} and schedule {schedule}; allowed: 1 with 1f1b, 2 or more with interleaved. Change "
            "one of them."
        )


def _allowed_micro_batches(pipeline: int, schedule: str) -> str:
    return f"a multiple of {pipeline}" if schedule == "interleaved" else f"{pipeline} or more"
