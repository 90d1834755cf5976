"""Trace a job's training step on a fake GPU: the bytes alive after every op, with few of its blocks.

What runs is the runtime's own conversion, options, parallelism and step, eager. One step is enough: what a step allocates and
keeps is counted from its start, so its first curve is that of the second.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from octet.api_schemas import JobSpec, tokens_per_sample
from octet.api_schemas.models import FamilySizes
from octet.api_schemas.plan import why_not_traced
from octet.worker.fp8 import weights
from octet.worker.fp8.experts import ExpertsForward
from octet.worker.mesh import Axes
from octet.worker.metrics.memory import memory_report
from octet.worker.models import TrainedModel
from octet.worker.models.model import Part
from octet.worker.optim import build_optimizer
from octet.worker.optim.schedule import parameter_groups
from octet.worker.parallel import Parallel, on_mesh, tensor
from octet.worker.parallel.pipeline import parallel as pipeline_parallel
from octet.worker.parallel.pipeline.split import split_of
from octet.worker.parallel.pipeline.stage import parts_of
from octet.worker.planning import network, stages
from octet.worker.planning.curve import Curve, Moment
from octet.worker.planning.fake_gpu import DEVICE_TYPE, fake_gpu, see_within
from octet.worker.planning.fake_gpu import device as register
from octet.worker.planning.live_bytes import LiveBytes
from octet.worker.prepare.adapters import add_adapters, attach_adapters
from octet.worker.prepare.initialize import prepare
from octet.worker.prepare.memory_options import prepare_steps

if TYPE_CHECKING:
    from octet.worker.parallel.pipeline.schedule import PipelineRun  # loads torch's pipelining, which takes a second

Batch = Callable[[], dict[str, Tensor]]
"""Makes a micro-batch."""
MOST_PASSES = 2
"""Micro-batches that are traced: every pass after the first finds the gradients of those before it."""
WHOLE = 1 << 62


class NotTraced(ValueError):
    """A job whose step cannot run on fake tensors, with the reason."""


class Trace(NamedTuple):
    """One rank's step. phases: each pass forward and backward, then the update.

    num_bytes_before: alive before the step. held: by class, as a job reports them. sent: bytes that the rank sends in the job's
    step, but for what replicas exchange, by axis, collective and dtype in one text.
    """

    phases: list[list[Moment]]
    num_bytes_before: int
    held: dict[str, int]
    sent: dict[str, int]


def check(spec: JobSpec) -> None:
    """Raise NotTraced, with the reason, for a job whose step does not run on a fake GPU."""
    if reason := why_not_traced(spec):
        raise NotTraced(reason)


def trace(
    spec: JobSpec,
    num_blocks: int | None,
    num_sequences: int,
    pipeline_rank: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Trace:
    """Trace the step of a rank with so many blocks, and sequences in a forward pass. Raises NotTraced.

    num_blocks: None for all, of a network whose blocks differ. pipeline_rank: of the first rank that holds those stages; all
    ranks of the pipeline get as many blocks. config: of the model's folder.
    """
    check(spec)
    wanted = list(stages.order(spec.layout, pipeline_rank, spec.batch.num_micro_batches))
    spec, pipeline_rank, num_traced = stages.shortened(spec, pipeline_rank)
    rank = spec.layout.group("pipeline", 0)[pipeline_rank]
    # Collectives in hooks abort on autograd's own threads.
    on_one_thread = torch.autograd.set_multithreading_enabled(False)
    with one_of(spec.resources.workers, rank, register().type), fake_gpu() as device, with_fake_values(), on_one_thread:
        live = Curve(_num_words(spec, config))
        with live:
            whole = None if num_blocks is None else num_blocks * spec.layout.pipeline
            sizes = network.sizes_of(spec, config)
            model = network.build(spec, config, whole)
            if spec.layout.pipeline > 1:
                _share_blocks_of_others(model, spec, pipeline_rank)
            model, optimizer, parallel = _build(spec, sizes, model, rank, device)
            if parallel.pipeline is not None:
                gc.collect()  # modules of other stages that refer to each other
            batch = partial(network.batch_of, spec, sizes, num_sequences, device)
            found = _step(spec, batch, model, optimizer, parallel, live, num_traced)
            if parallel.pipeline is None:
                return found
            traced = list(stages.order(spec.layout, pipeline_rank, num_traced))
            return found._replace(phases=stages.composed(found.phases, traced, wanted))


def _share_blocks_of_others(model: nn.Module, spec: JobSpec, pipeline_rank: int) -> None:
    """Let each other stage repeat its first block, since a rank converts the blocks of all stages and then drops those."""
    names = split_of(model).blocks
    for rank in range(spec.layout.pipeline):
        for part in parts_of(spec.layout, rank, len(names)).values() if rank != pipeline_rank else ():
            for index in part.blocks[1:]:
                model.set_submodule(names[index], model.get_submodule(names[part.blocks[0]]))


def find_network(spec: JobSpec, config: Mapping[str, Any] | None) -> network.Found | None:
    """Look at a network of transformers, whose parameters nobody else knows; None for one with a closed form."""
    if spec.model.family != "huggingface":
        return None
    check(spec)
    with fake_gpu(), LiveBytes(see_within=see_within, device_type=DEVICE_TYPE):
        return network.look_at(spec, config)


def _build(
    spec: JobSpec, sizes: FamilySizes, model: TrainedModel, rank: int, device: torch.device
) -> tuple[TrainedModel, Any, Parallel]:
    """Convert a model and put it on its mesh as a job does, with parameters that have no values."""
    training = spec.training
    network.to_device(model, device)
    precision = spec.resolved_precision.model_copy(update={"statistics_every": 0})
    add_adapters(model, spec.adapter, precision, training.seed, device)
    optimizer = build_optimizer(parameter_groups(model, training.optimizer), training.optimizer, training.gradient_clip)
    tokens = spec.batch.micro_batch_size * tokens_per_sample(sizes.takes, training.sequence_length)
    prepared = prepare(model, optimizer, precision, seed=training.seed, tokens=tokens)
    assert prepared.optimizer is not None
    attach_adapters(prepared.model)
    eager = training.model_copy(update={"compile": "off"})
    prepare_steps(prepared.model, prepared.optimizer, eager, device)
    mesh = Axes.of_layout(spec.layout, rank, device)
    return model, prepared.optimizer, on_mesh(prepared.model, prepared.optimizer, mesh, spec.parallelism)


def _step(
    spec: JobSpec, batch: Batch, model: TrainedModel, optimizer: Any, parallel: Parallel, live: Curve, num_traced: int
) -> Trace:
    """Take one step. Returns its curve. num_traced: the micro-batches that pass through a pipeline."""
    before, num_passes, buffers = live.num_bytes, spec.batch.num_micro_batches, list[Tensor]()
    sent_before = sent_on_axes(parallel.axes)
    live.begin_step(model, optimizer)
    if parallel.pipeline is None:
        num_traced = min(num_passes, MOST_PASSES)
        _pass_alone(num_traced, batch, model, parallel, live)
    else:
        buffers = _pass_on(num_passes, num_traced, batch, parallel, parallel.pipeline, live)
    by_passes = sent_on_axes(parallel.axes) - sent_before
    live.begin("update")
    parallel.synchronize()
    if spec.training.gradient_clip is not None:
        parallel.clip_grad_norm_(spec.training.gradient_clip)
    optimizer.step()
    parallel.publish()
    del buffers  # torch's schedule keeps its own as long
    sent = sent_on_axes(parallel.axes) - sent_before
    for key, num_bytes in by_passes.items():  # each pass sends the same
        sent[key] += num_bytes // num_traced * (num_passes - num_traced)
    return Trace(live.phases(), before, memory_report(model, optimizer), dict(sent))


def sent_on_axes(axes: Axes) -> Counter[str]:
    """Return the bytes that the rank has sent on every axis but those of replicas, whose bytes have a closed form."""
    counted = [axis.sent_bytes for axis in (axes.replicas, axes.data, axes.expert_replicas)]
    found = Counter[str]()
    for name in ("tensor", "context", "expert", "pipeline", "stage", "world"):
        sent = axes[name].sent_bytes
        if not any(sent is each for each in counted):  # axes of the same ranks share one counter
            counted.append(sent)
            found.update({f"{name} {collective} {dtype}": num_bytes for (collective, dtype), num_bytes in sent.items()})
    return found


def _pass_alone(num_passes: int, batch: Batch, model: TrainedModel, parallel: Parallel, live: Curve) -> None:
    """Pass micro-batches forward and backward, one after the other."""
    for index in range(num_passes):
        live.begin("forward")
        samples = batch()
        with parallel.no_sync(index < num_passes - 1):
            loss = model.loss(samples).loss / num_passes
            live.begin("backward")
            loss.backward()


def _pass_on(
    num_passes: int,
    num_traced: int,
    batch: Batch,
    parallel: Parallel,
    pipeline: "PipelineRun",
    live: Curve,
) -> list[Tensor]:
    """Pass as many micro-batches as are traced through the rank's stages, in the order of its schedule.

    torch keeps a buffer for what each micro-batch receives, so those of the others are allocated, and returned.
    """
    live.divides_backward = True
    live.begin("forward")
    batches = [batch() for _ in range(num_passes)]
    borders = pipeline.borders(batches[0])

    def compute(index: int, part: Part, hidden_BTD: Tensor | None) -> Tensor:
        live.begin("forward")
        if part.is_last:
            return pipeline.split.loss(part, batches[index], hidden_BTD).loss / num_passes
        return pipeline.split.output(part, batches[index], hidden_BTD)

    received = [
        border
        for stage, part in pipeline.stages.parts.items()
        for border, is_received in ((borders[stage], not part.is_first), (borders[stage + 1], not part.is_last))
        if is_received
    ]
    buffers = [
        torch.empty(num_passes - num_traced, *shape, dtype=dtype, device=parallel.replicas.device) for shape, dtype in received
    ]
    with parallel.no_sync(), torch.enable_grad():
        pipeline.run(compute, num_traced, borders)
    return buffers


def _num_words(spec: JobSpec, config: Mapping[str, Any] | None) -> int | None:
    """Return the words of the vocabulary that are on a rank, and so of its logits."""
    num_words = getattr(network.sizes_of(spec, config), "vocab_size", None)
    return None if num_words is None else num_words // spec.parallelism.tensor


@contextmanager
def with_fake_values() -> Iterator[None]:
    """Leave out what reads values, or spares memory that fake tensors do not take."""
    with ExitStack() as stack:
        for owner, name, replacement in (
            (ExpertsForward, "of_experts", _routed_evenly),
            (weights, "PIECE_ELEMENTS", WHOLE),  # else each weight is encoded in hundreds of pieces
            (tensor, "check_unused", lambda _optimizer: None),  # it reads the number of steps taken
            (pipeline_parallel, "check_unused", lambda _optimizer: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def _routed_evenly(experts: ExpertsForward, input_SK: Tensor, _expert_S: Tensor) -> Tensor:
    """Return the output of each row's expert, of experts with as many rows each, (S, K)."""
    num_rows, num_experts = len(input_SK), len(experts.up)
    return experts.multiply(
        input_SK, [num_rows // num_experts + (index < num_rows % num_experts) for index in range(num_experts)]
    )


@contextmanager
def one_of(num_ranks: int, rank: int = 0, device_type: str = "cpu") -> Iterator[None]:
    """Make a process group in which only one rank exists, for tensors on the CPU and on a device of type `device_type`."""
    if num_ranks == 1:
        yield
        return
    backend = ",".join(f"{each}:fake" for each in dict.fromkeys(("cpu", device_type)))
    dist.init_process_group(backend, rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
