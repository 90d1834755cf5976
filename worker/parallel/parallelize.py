"""`parallelize`: train a converted model on several ranks in a loop of one's own, in place of torch's DDP or FSDP2.

    dist.init_process_group()
    model, optimizer = initialize(model, optimizer, "O2")
    parallel = parallelize(model, optimizer, zero_stage=1)
    with parallel.no_sync():
        loss(first).backward()
    loss(last).backward()
    parallel.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

Each rank reads its own part of the batch. Ranks that divide layers, or the tokens of long sequences, read the same one, that of
`parallel.data.rank`: `parallelize(model, optimizer, tensor=2, context=2)`. The trainer of jobs runs the same `Parallel`.
"""

import os
from collections.abc import Mapping
from typing import Unpack

import torch
import torch.distributed as dist
from torch import nn

from octet.api_schemas.layout import PipelineSchedule, WideDtype
from octet.worker.mesh import Axes
from octet.worker.parallel.data_parallel import broadcast_parameters
from octet.worker.parallel.loop import ParallelLoop
from octet.worker.parallel.materialize import fill_now, waits_for_values
from octet.worker.parallel.parallel import WIDE_DTYPES
from octet.worker.parallel.strategies import DEGREES, DivisionOptions, divide
from octet.worker.parallel.strategy import check_rules

SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved")


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    zero_stage: int = 0,
    wide_communication: WideDtype = "fp32",
    group: dist.ProcessGroup | None = None,
    plan: Mapping[str, str] | None = None,
    **options: Unpack[DivisionOptions],
) -> ParallelLoop:
    """Train a model, converted by `initialize` or not, on all ranks of a process group; all ranks call it together.

    Call it after `initialize`, with the model on its device; the ranks then start from the first rank's parameters. After
    `load_pretrained(…, by_shard=True)` each rank reads its share of the model now, and no rank ever holds the whole. After a
    backward pass outside `no_sync`, gradients are means over the ranks. In training each rank draws numbers of its own inside
    the model's forward pass, for dropout.

    zero_stage: 1 shards optimizer states, master weights, residuals and the means of gradients; 2 also gradients that
    accumulate over micro-batches; 3 also the weights of blocks that the model repeats, and of embedding and head in our
    language models and those of transformers, which are gathered while they compute: outside of their calls such a weight
    reads as NaN. At stage 3 all ranks run the same blocks in the same order, and blocks are compiled before this call.
    Clip by `Parallel.clip_grad_norm_`: torch's function is refused for the model's parameters, and sees only this rank's pieces
    in the optimizer's groups. All ranks call `state_dict` and `load_state_dict`, of model and optimizer, together.
    wide_communication: dtype in which gradients travel that are not in FP8, and at stage 3 fp32 weights that are gathered; bf16
    rounds each rank's once, for half the bytes.
    group: by default all ranks of the world; a single process needs none.
    tensor: this many neighbouring ranks divide each layer of the plan and read the same samples; the ranks of
    `Parallel.data` read different ones. Parameters of these layers, and their values in state dicts, are then this rank's
    shards.
    plan: a role for each glob of module names: column, "column of 3", row, embedding or head. By default the plan is that of
    the family, or transformers' `base_model_tp_plan`, whose head stays whole. With a head in the plan, logits are of this
    rank's tokens.
    sequence: with a tensor degree, its ranks also divide the tokens of activations between the layers of a block.
    context: this many ranks divide the tokens of each sequence of a gpt or llama of ours, and attend to the keys and values of
    all. They read the same samples, whole; logits and `loss` are of this rank's tokens, which `Parallel.own_tokens` returns of
    targets. Ranks lie in the order data, context, tensor, the last next to each other, as those of
    `init_device_mesh(…, mesh_dim_names=("dp", "cp", "tp"))`.
    expert: this many ranks each hold some experts of every mixture, as state dicts then do. zero_stage: 0 or 1.
    pipeline: this many ranks hold consecutive blocks of the model; it is the slowest axis of the mesh. `Parallel.step(inputs,
    targets, loss_fn)` then runs all passes of a batch, the same one on all ranks but those of `Parallel.data`, in
    micro_batches of one size (as torch's `n_microbatches`), and returns the loss on the last stage. The model is a gpt or
    llama of ours, an `nn.Sequential`, or one with a list of blocks, whose name is `blocks`; `pipeline/split.py` documents the
    form of its `forward`. Each rank builds the whole model; state dicts hold this rank's part under the names of the whole.
    zero_stage: 0 or 1.
    schedule: "1f1b" or "interleaved", in which each rank holds stages_per_rank runs of blocks (2) and waits less.
    micro_batches: without a pipeline, the number in which `step` accumulates gradients; 1 by default.
    Raises ValueError without a process group under torchrun, for another stage or dtype, for an optimizer that cannot be
    sharded, at stage 3 for a model without such blocks, for a model that a degree cannot divide, and for degrees that do not
    go together.
    """
    _check_wide(wide_communication)
    _require_group()
    given = _with_defaults(options, zero_stage)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    degrees: dict[str, int] = {name: given.get(name, 1) for name in DEGREES}  # type: ignore[misc]  # all are numbers
    axes = Axes.of_group(device, group, **degrees)
    is_filled = not waits_for_values(model)
    if is_filled:
        _start_alike(model, optimizer, axes)
    parallel = ParallelLoop(
        model,
        optimizer,
        axes,
        num_micro_batches=given["micro_batches"],
        zero_stage=zero_stage,
        wide_dtype=WIDE_DTYPES[wide_communication],
        parts=divide(model, optimizer, axes, plan=plan, sequence=given["sequence"], blocks=given.get("blocks")),
    )
    if not is_filled:
        fill_now(parallel)
    return parallel


def _check_wide(wide_communication: str) -> None:
    if wide_communication not in WIDE_DTYPES:
        allowed = ", ".join(WIDE_DTYPES)
        raise ValueError(f"wide_communication is {wide_communication!r}; allowed: {allowed}. Use one of these.")


def _require_group() -> None:
    """Raise ValueError for a rank of torchrun without a process group, which would train alone."""
    is_ready = dist.is_available() and dist.is_initialized()
    if not is_ready and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and there is no process group; allowed: one that is initialized. Call "
            "torch.distributed.init_process_group() before initialize and parallelize."
        )


def _start_alike(model: nn.Module, optimizer: torch.optim.Optimizer, axes: Axes) -> None:
    """Give every rank the first rank's parameters, and the master weights that its codes are rounded from."""
    broadcast_parameters(model, lambda _tensor: axes.world)
    for state in optimizer.state.values():
        for master in state.get("master_weights", {}).values():
            axes.world.broadcast_(master)


def _with_defaults(options: DivisionOptions, zero_stage: int) -> DivisionOptions:
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
        "expert": 1,
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
