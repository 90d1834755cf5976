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
`parallel.data.rank`: `parallelize(model, optimizer, tensor=2, context=2)`. `Parallel` is also what the trainer of jobs uses.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from api_schemas.resources import WideDtype
from worker.blocks import repeated_blocks
from worker.mesh import TensorInPieces
from worker.models.context import divide_sequences
from worker.models.model import Losses, TrainedModel
from worker.optim import LowBitOptimizer, clip_grad_norm_
from worker.parallel.axes import Axes, axes_of
from worker.parallel.blocks import divisible_parameters
from worker.parallel.data_parallel import MAX_ELEMENTS, GradientBuckets
from worker.parallel.degrees import Degrees, checked
from worker.parallel.norm import clip_together
from worker.parallel.plans import check_heads, plan_of
from worker.parallel.scales import agree_on_scales, all_finite_on
from worker.parallel.scaling import share_scaling
from worker.parallel.tensor import TensorShards, check_compiled, check_model
from worker.parallel.zero import ShardedStates

if TYPE_CHECKING:
    from worker.parallel.own_loop import OwnLoop
    from worker.parallel.pipeline import PipelineRun

T = TypeVar("T")
ZERO_STAGES = (0, 1, 2, 3)
WIDE_DTYPES: dict[WideDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Parallel:
    """A model and its optimizer on the ranks of an axis: what happens between the backward pass and the next forward pass."""

    pipeline: "PipelineRun | None" = None
    """What runs all passes of a step where ranks hold stages of the model."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        axes: Axes,
        *,
        zero_stage: int = 0,
        wide_dtype: torch.dtype = torch.float32,
        max_elements: int = MAX_ELEMENTS,
        shards: TensorShards | None = None,
    ) -> None:
        """shards: from `cut_model`, where the tensor axis has several ranks.

        wide_dtype: in which gradients travel that are not in FP8, and fp32 weights of blocks. max_elements: of a bucket.

        Raises ValueError for another stage, for an optimizer or a parameter that cannot be sharded, and at stage 3 for a model
        without blocks that repeat.
        """
        if zero_stage not in ZERO_STAGES:
            raise ValueError(
                f"zero_stage is {zero_stage}; allowed: {', '.join(map(str, ZERO_STAGES))}. Stage 3 shards weights, gradients, "
                "optimizer states and master weights."
            )
        self.model, self.optimizer, self.data, self.stage = model, optimizer, axes.data, axes.stage
        self.shards = shards or TensorShards(axes)
        self.replicas, stage = axes.replicas, axes.stage
        blocks = _blocks(model) if zero_stage == 3 and self.replicas.size > 1 else []
        divided = divisible_parameters(model, blocks)
        self.gradients = GradientBuckets(model, self.replicas, max_elements=max_elements, wide_dtype=wide_dtype, blocks=divided)
        self._sharded: ShardedStates | None = None
        if zero_stage and self.replicas.size > 1:
            if not isinstance(optimizer, LowBitOptimizer):
                raise ValueError(
                    f"zero_stage is {zero_stage} and the optimizer a {type(optimizer).__name__}; allowed: AdamW, Adam "
                    "and Lion after initialize. Use one of these, or zero_stage=0."
                )
            self._sharded = ShardedStates(optimizer, self.gradients, self.shards, stage if self.shards.cuts else self.replicas)
            self.gradients.reduces_each_pass = zero_stage >= 2
            if zero_stage == 3:
                self._sharded.divide_blocks(blocks, divided, wide_dtype)
        elif self.shards.cuts and isinstance(optimizer, LowBitOptimizer):
            optimizer.all_ranks_finite = partial(all_finite_on, self.shards.axis)

    def no_sync(self, is_on: bool = True) -> AbstractContextManager[None]:
        """Inside, gradients accumulate: for all micro-batches of a step but the last. Not if is_on is false.

        Each rank accumulates its own; at stage 2 the owners of pieces do, and each backward pass inside is an exchange.
        """
        return self.gradients.no_sync(is_on)

    def synchronize(self) -> None:
        """Wait until gradients are means over the ranks, and share the state of FP8 scaling. Once per optimizer step."""
        self.gradients.finish()
        share_scaling(self.model, self.stage)

    def clip_grad_norm_(self, max_norm: float = math.inf) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most max_norm. Returns the norm before, fp32 ()."""
        if self._sharded is not None:
            return self._sharded.clip_grad_norm_(max_norm)
        if isinstance(self.optimizer, LowBitOptimizer) and self.optimizer.released is not None:
            return self.optimizer.released.norm()  # nothing is left to clip, which no job asks for
        if self.shards.cuts:
            gradients: dict[Tensor, Tensor] = {
                parameter: parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
            }
            return clip_together(gradients, max_norm, self.shards.counts, self.shards.axis)
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def publish(self) -> None:
        """Give every rank the whole weights after the optimizer's step, or its whole shards, with one scale for each weight."""
        if self._sharded is not None:
            self._sharded.publish()
        elif self.shards.cuts and isinstance(self.optimizer, LowBitOptimizer):
            quantized = self.optimizer._quantized
            weights = [quantized[shard] for shard in self.shards.cuts if shard in quantized]
            agree_on_scales(self.optimizer, weights, None, self.shards.axis)

    def as_many_passes(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches for forward passes without gradients. At stage 3, ranks that have fewer wait for the others.

        All ranks call it together, where the numbers of their batches may differ.
        """
        blocks = None if self._sharded is None else self._sharded.blocks
        return iter(batches) if blocks is None else blocks.as_many_passes(batches)

    def losses(self, model: Any, batch: Mapping[str, Tensor]) -> Losses:
        """The losses of an evaluation batch. model: this one, or the average of its weights."""
        found: Losses = model.loss(batch)
        return found

    def own_tokens(self, whole: Tensor, dim: int = -1) -> Tensor:
        """Return what belongs to this rank's tokens, of all tokens of a sequence: those that logits are of. dim: of the tokens.

        Without a context degree these are all tokens.
        """
        return self.model.own_tokens(whole, dim) if isinstance(self.model, TrainedModel) else whole

    def piece_of(self, parameter: Tensor) -> tuple[Tensor, range]:
        """Return what this rank's optimizer steps of a parameter, and which elements: all of them without ZeRO."""
        piece = None if self._sharded is None else self._sharded.piece_of(parameter)
        return (parameter, range(parameter.numel())) if piece is None else piece

    def holds_whole(self, tensor: Tensor) -> bool:
        """Whether this rank holds a parameter or buffer of its model, or its shard, for good: all but blocks at stage 3."""
        blocks = None if self._sharded is None else self._sharded.blocks
        return blocks is None or tensor not in blocks.parameters

    def state_dicts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state dicts of model and optimizer for `worker.checkpoint.save`. All ranks call it together.

        Each rank has its own pieces (ZeRO) and shards (tensor degree) of weights and states, as `TensorInPieces`. The host does
        not wait for the device, but between the stages of a pipeline: they exchange as text what each of them holds.
        """
        if self._sharded is not None:
            model, optimizer = self._sharded.state_dicts_in_pieces()
        else:
            model, optimizer = self.model.state_dict(), late_state_of(self.optimizer)
        return self.shards.mark(model, optimizer, self.optimizer)

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor in the model's state dict, of which nothing is put together."""
        held = self.model.state_dict() if self._sharded is None else self._sharded.model_in_pieces()
        return {name: value.own.dtype if isinstance(value, TensorInPieces) else value.dtype for name, value in held.items()}

    def own_part(self, model: dict[str, Any], optimizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return state dicts of whole tensors as this rank loads them: with the shards that it holds."""
        return self.shards.cut_saved(model, optimizer, self.optimizer)


def late_state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer, for which the host does not wait."""
    return optimizer.late_state_dict() if isinstance(optimizer, LowBitOptimizer) else optimizer.state_dict()


def _blocks(model: nn.Module) -> list[nn.Module]:
    blocks = repeated_blocks(model)
    if not blocks:
        raise ValueError(
            "zero_stage is 3 and the model repeats no blocks; allowed: models with an nn.ModuleList or nn.Sequential of alike "
            "blocks, whose weights are gathered one block at a time. Use zero_stage=2."
        )
    return blocks


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    zero_stage: int = 0,
    wide_communication: WideDtype = "fp32",
    group: dist.ProcessGroup | None = None,
    plan: Mapping[str, str] | None = None,
    **degrees: Unpack[Degrees],
) -> "OwnLoop":
    """Train a model, converted by `initialize` or not, on all ranks of a process group; all ranks call it together.

    Call it after `initialize`, with the model on its device; the ranks then start from the first rank's parameters. After a
    backward pass outside `no_sync`, gradients are means over the ranks. In training each rank draws numbers of its own inside
    the model's forward pass, for dropout.

    zero_stage: 1 shards optimizer states, master weights, residuals and the means of gradients; 2 also gradients that
    accumulate over micro-batches; 3 also the weights of blocks that the model repeats, which are gathered while a block
    computes. At stage 3 all ranks run the same blocks in the same order, and blocks are compiled before this call.
    Clip by `Parallel.clip_grad_norm_`: torch's function is refused for the model's parameters, and sees only this rank's pieces
    in the optimizer's groups. All ranks call `state_dict` and `load_state_dict`, of model and optimizer, together.
    wide_communication: dtype in which gradients travel that are not in FP8, and at stage 3 fp32 weights of blocks; bf16 rounds
    each rank's once, for half the bytes.
    group: by default all ranks of the world; a single process needs none.
    tensor: so many neighbouring ranks divide each layer of the plan and read the same samples; the ranks of
    `Parallel.data` read different ones. Parameters of these layers, and their entries in state dicts, are then this rank's
    shards.
    plan: a role for each glob of module names, column, "column of 3", row, embedding or head; by default that of the family, or
    transformers' `base_model_tp_plan`, whose head stays whole. With a head in the plan, logits are of this rank's tokens.
    sequence: with a tensor degree, its ranks also divide the tokens of activations between the layers of a block.
    context: so many ranks divide the tokens of each sequence of a gpt or llama of ours, and attend to the keys and values of
    all. They read the same samples, whole; logits and `loss` are of this rank's tokens, which `Parallel.own_tokens` gives of
    targets. Ranks lie in the order data, context, tensor, the last next to each other, as those of
    `init_device_mesh(…, mesh_dim_names=("dp", "cp", "tp"))`.
    pipeline: so many ranks hold consecutive blocks of the model; the slowest axis of the mesh. `Parallel.step(inputs, targets,
    loss_fn)` then runs all passes of a batch, on all ranks but those of `Parallel.data` the same one, in micro_batches of one
    size (as torch's `n_microbatches`), and returns the loss on the last stage. The model is a gpt or llama of ours, an
    `nn.Sequential`, or one whose list of blocks is named by blocks (`staging.py` says what its `forward` has to do). Each rank
    builds the whole model; state dicts hold what it keeps, under the names of the whole. zero_stage: 0 or 1.
    schedule: "1f1b" or "interleaved", in which each rank holds stages_per_rank runs of blocks (2) and waits less.
    micro_batches: without a pipeline, as many in which `step` accumulates gradients; 1 by default.
    Raises ValueError without a process group under torchrun, for another stage or dtype, for an optimizer that cannot be
    sharded, at stage 3 for a model without such blocks, for a model that a degree cannot divide, and for degrees that do not go
    together.
    """
    if wide_communication not in WIDE_DTYPES:
        allowed = ", ".join(WIDE_DTYPES)
        raise ValueError(f"wide_communication is {wide_communication!r}; allowed: {allowed}. Use one of these.")
    is_ready = dist.is_available() and dist.is_initialized()
    if not is_ready and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and there is no process group; allowed: one that is initialized. Call "
            "torch.distributed.init_process_group() before initialize and parallelize."
        )
    given = checked(degrees, zero_stage)
    tensor, context = given["tensor"], given["context"]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    axes = axes_of(tensor, device, group, context, given["pipeline"])
    roles = plan_of(model, plan) if tensor > 1 else {}
    check_heads(model, tensor)
    dtype = WIDE_DTYPES[wide_communication]
    if axes.pipeline.size > 1:
        from worker.parallel.staged_loop import start_staged_loop  # loads torch's pipelining, which takes a second

        return start_staged_loop(model, optimizer, axes, zero_stage, dtype, roles, given)
    from worker.parallel.own_loop import start_loop  # which knows `Parallel`

    if context > 1:
        check_model(model, "context")
        check_compiled(model, "a context degree")
        divide_sequences(model, axes.context)
    return start_loop(model, optimizer, axes, zero_stage, dtype, roles, given)
