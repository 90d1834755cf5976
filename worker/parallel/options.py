"""The options of `parallelize` that divide a model over ranks, apart from ZeRO, with the combinations that are refused."""

from octet.api_schemas.layout import PipelineSchedule
from octet.worker.parallel.strategies import DivisionOptions
from octet.worker.parallel.strategy import check_rules

SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved")


def with_defaults(options: DivisionOptions, zero_stage: int) -> DivisionOptions:
    """Return all options with their values. Raises TypeError for another option, and ValueError for what does not fit."""
    if unknown := options.keys() - DivisionOptions.__annotations__.keys():
        raise TypeError(
            f"parallelize got {sorted(unknown)[0]!r}; allowed: zero_stage, wide_communication, group, plan, "
            f"{', '.join(DivisionOptions.__annotations__)}. Correct the name, or leave it out."
        )
    check_rules({"zero_stage": zero_stage, **options})
    pipeline = options.get("pipeline", 1)
    if (number := options.get("micro_batches", 1)) < 1:
        raise ValueError(f"micro_batches is {number}; allowed: 1 or more. Change it, or leave it out.")
    _check_schedule(options)
    if pipeline != 1:
        _check_pipeline(options)
    elif unused := [name for name in ("schedule", "stages_per_rank", "blocks") if name in options]:
        raise ValueError(f"{unused[0]} is set and pipeline is 1; allowed: 2 or more. Set pipeline, or leave {unused[0]} out.")
    defaults: DivisionOptions = {
        "tensor": 1,
        "sequence": False,
        "context": 1,
        "pipeline": 1,
        "micro_batches": 1,
        "schedule": "1f1b",
    }
    of_schedule: DivisionOptions = {"stages_per_rank": 2 if options.get("schedule") == "interleaved" else 1}
    return defaults | of_schedule | options


def _check_schedule(options: DivisionOptions) -> None:
    schedule = options.get("schedule", "1f1b")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; allowed: {', '.join(SCHEDULES)}. Use one of these.")


def _check_pipeline(options: DivisionOptions) -> None:
    pipeline, schedule = options["pipeline"], options.get("schedule", "1f1b")
    if pipeline < 1:
        raise ValueError(f"pipeline is {pipeline}; allowed: 1, or a divisor of the ranks. Change it.")
    if "micro_batches" not in options:
        raise ValueError(
            f"pipeline is {pipeline} and micro_batches is not set; allowed: {_allowed_micro_batches(pipeline, schedule)}, into "
            f"which each batch is divided. Set it: with {4 * pipeline} ranks compute about four fifths of the time."
        )
    number = options["micro_batches"]
    if number < pipeline or (schedule == "interleaved" and number % pipeline):
        raise ValueError(
            f"micro_batches is {number}, pipeline {pipeline} and schedule {schedule}; allowed: "
            f"{_allowed_micro_batches(pipeline, schedule)}. Change micro_batches or pipeline."
        )
    num_runs = options.get("stages_per_rank")
    if (num_runs is not None and (num_runs == 1) != (schedule == "1f1b")) or (num_runs is not None and num_runs < 1):
        raise ValueError(
            f"stages_per_rank is {num_runs} and schedule {schedule}; allowed: 1 with 1f1b, 2 or more with interleaved. Change "
            "one of them."
        )


def _allowed_micro_batches(pipeline: int, schedule: str) -> str:
    return f"a multiple of {pipeline}" if schedule == "interleaved" else f"{pipeline} or more"
