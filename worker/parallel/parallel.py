"""`Parallel`: one rank's share of a model and of its optimizer, between a backward pass and the next forward pass.

The trainer of jobs calls its methods in each step; in somebody's own loop hooks of the optimizer do (`loop.py`). `on_mesh` and
`parallelize` make it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from octet.api_schemas import AxisName
from octet.api_schemas.layout import WideDtype
from octet.worker.fp8.operand import OperandScaling
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.fp8.weight import Float8Weight
from octet.worker.kernels.torch_private import foreach_copy_
from octet.worker.mesh import Axes, Axis, TensorInPieces
from octet.worker.models.model import Losses, TrainedModel
from octet.worker.optim import LowBitOptimizer, clip_grad_norm_
from octet.worker.optim.shards import agree_on_finite
from octet.worker.parallel.data_parallel import MAX_ELEMENTS, GradientBuckets
from octet.worker.parallel.expert import DividedExperts
from octet.worker.parallel.norm import clip_together
from octet.worker.parallel.pipeline.parallel import PipelinedModel
from octet.worker.parallel.strategy import DividedModel, replicas_by_tensor
from octet.worker.parallel.tensor import TensorShards
from octet.worker.parallel.zero import ShardedStates, check_zero
from octet.worker.prepare.export_state_dict import OwnParameters, set_reader

if TYPE_CHECKING:
    from octet.worker.parallel.pipeline.schedule import PipelineRun  # loads torch's pipelining, which takes a second

T = TypeVar("T")
WIDE_DTYPES: dict[WideDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_COMMON_AXES: Mapping[frozenset[AxisName], AxisName] = {
    frozenset({"tensor"}): "tensor",
    frozenset({"replicas"}): "replicas",
    frozenset({"replicas", "tensor"}): "stage",
    frozenset({"pipeline"}): "pipeline",
    frozenset({"expert"}): "expert",
}
"""The axis of the ranks that hold one model between them, by the axes that divide its parameters; else the world."""


class Owners(NamedTuple):
    """The ranks that hold one model between them: they agree on norms and on skipped steps.

    counts: returns True if this rank's copy of a parameter counts in what they add up.
    """

    axis: Axis
    counts: Callable[[Tensor], bool]


class Parallel:
    """A model and its optimizer on the ranks of a mesh."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        axes: Axes,
        *,
        zero_stage: int = 0,
        wide_dtype: torch.dtype = torch.float32,
        max_elements: int = MAX_ELEMENTS,
        parts: Sequence[DividedModel] = (),
    ) -> None:
        """parts: from `divide`, where strategies have divided the model.

        wide_dtype: in which gradients travel that are not in FP8, and fp32 weights at stage 3. max_elements: of a bucket.

        Raises ValueError for another stage, for an optimizer or a parameter that cannot be sharded, and at stage 3 for a model
        without blocks that repeat.
        """
        self.model, self.optimizer, self.axes, self.parts = model, optimizer, axes, parts
        self.data, self.replicas, self.stage = axes.data, axes.replicas, axes.stage
        self.shards = next((part for part in parts if isinstance(part, TensorShards)), TensorShards(axes))
        self.pipeline: PipelineRun | None = next((part.run for part in parts if isinstance(part, PipelinedModel)), None)
        """The passes of a step, where ranks hold stages of the model."""
        divided = check_zero(model, zero_stage, self.replicas)
        apart = replicas_by_tensor(parts)
        self.gradients = GradientBuckets(
            model,
            self.replicas,
            max_elements=max_elements,
            wide_dtype=wide_dtype,
            homes=None if divided is None else divided.homes,
            axis_of=lambda parameter: apart.get(parameter, axes.replicas),
        )
        shards_states = zero_stage > 0 and self.replicas.size > 1
        owners = self._owners(shards_states=shards_states)
        self._sharded: ShardedStates | None = None
        if shards_states:
            stage = axes.stage if axes.tensor.size > 1 else None
            self._sharded = ShardedStates(optimizer, self.gradients, owners.axis, owners.counts, stage, zero_stage)
            if divided is not None:
                self._sharded.shard_blocks(divided, wide_dtype)
        elif parts and isinstance(optimizer, LowBitOptimizer):
            optimizer.all_ranks_finite = partial(agree_on_finite, owners.axis)
        self._experts = next((part for part in parts if isinstance(part, DividedExperts)), None)
        read_over_ranks(model, self._sharded, self.shards, self._experts)
        self._clip = self._clipping(owners)

    def no_sync(self, is_on: bool = True) -> AbstractContextManager[None]:
        """Inside, gradients accumulate: for all micro-batches of a step but the last. Not if is_on is false.

        Each rank accumulates its own; at stage 2 the owners of pieces do, and each backward pass inside is an exchange.
        """
        return self.gradients.no_sync(is_on)

    def synchronize(self) -> None:
        """Wait until gradients are means over the ranks, and share the state of FP8 scaling. Once per optimizer step."""
        self.finish_gradients()
        agree_on_amaxes(self.model, self.stage, {} if self._experts is None else self._experts.held_apart())

    def finish_gradients(self) -> None:
        """Wait until gradients are means over the ranks."""
        for part in self.parts:
            part.before_exchange()
        self.gradients.finish()

    def drop_interrupted_pass(self) -> None:
        """Forget a backward pass that an exception has ended on all ranks, which call it together. Else it does nothing."""
        self.gradients.drop_interrupted_pass()
        if self._sharded is not None and self._sharded.blocks is not None:
            self._sharded.blocks.release()

    def clip_grad_norm_(self, max_norm: float = math.inf) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most max_norm. Returns the norm before, fp32 ()."""
        return self._clip(max_norm)

    @property
    def publishes(self) -> bool:
        """True if `publish` does something."""
        return self._sharded is not None or bool(self.parts)

    def publish(self) -> None:
        """Give every rank the whole weights after the optimizer's step, or its whole shards, with one scale for each weight."""
        if self._sharded is not None:
            self._sharded.publish()
            return
        for part in self.parts:
            part.after_step(self.optimizer)

    def as_many_passes(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches for forward passes without gradients. Ranks that have fewer take part in the passes of the others.

        They do so where a pass takes collectives of these ranks: at stage 3, and for experts on several ranks. All ranks call
        it together, where the numbers of their batches may differ.
        """
        blocks = None if self._sharded is None else self._sharded.blocks
        take_part = blocks.take_part if blocks is not None else None if self._experts is None else self._experts.take_part
        return iter(batches) if take_part is None else as_many_passes(batches, self.replicas, take_part)

    def losses(self, model: Any, batch: Mapping[str, Tensor]) -> Losses:
        """Return the losses of an evaluation batch, in the last stage of a pipeline, whose ranks call it together.

        model: this one, or the average of its weights.
        """
        if self.pipeline is not None:
            assert model is self.model
            return self.pipeline.losses(batch)
        losses: Losses = model.loss(batch)
        return losses

    def own_tokens(self, whole: Tensor, dim: int = -1) -> Tensor:
        """Return what belongs to this rank's tokens, of all tokens of a sequence: those that logits are of. dim: of the tokens.

        Without a context degree these are all tokens.
        """
        return self.model.own_tokens(whole, dim) if isinstance(self.model, TrainedModel) else whole

    def own_values(self, parameter: Tensor, values: Tensor) -> Tensor:
        """Return what this rank holds of the values of a whole parameter, before ZeRO divides it."""
        for part in self.parts:
            values = part.own_values(parameter, values)
        return values

    def piece_of(self, parameter: Tensor) -> tuple[Tensor, range]:
        """Return what this rank's optimizer steps of a parameter, and which elements: all of them without ZeRO."""
        piece = None if self._sharded is None else self._sharded.piece_of(parameter)
        return (parameter, range(parameter.numel())) if piece is None else piece

    def holds_whole(self, tensor: Tensor) -> bool:
        """Return True if this rank holds a parameter or buffer of its model, or its shard, for good.

        These are all but what stage 3 divides.
        """
        blocks = None if self._sharded is None else self._sharded.blocks
        return blocks is None or tensor not in blocks.parameters

    def state_dicts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state dicts of model and optimizer for `octet.worker.checkpoint.save`. All ranks call it together.

        Each rank has its own pieces (ZeRO) and shards (tensor degree) of weights and states, as `TensorInPieces`. The host does
        not wait for the device, but between the stages of a pipeline: they exchange as text what each of them holds.
        """
        if self._sharded is not None:
            model, optimizer_state = self._sharded.state_dicts_in_pieces()
        else:
            model, optimizer_state = exact_state_dict(self.model), late_state_of(self.optimizer)
        for part in reversed(self.parts):
            model, optimizer_state = part.mark(model, optimizer_state, self.optimizer)
        return model, optimizer_state

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of each tensor in the model's state dict, without putting any together."""
        held = exact_state_dict(self.model) if self._sharded is None else self._sharded.model_in_pieces()
        return {name: value.own.dtype if isinstance(value, TensorInPieces) else value.dtype for name, value in held.items()}

    def own_part(self, model: dict[str, Any], optimizer_state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return state dicts of whole tensors as this rank loads them: what its stages hold, in its shards."""
        for part in self.parts:
            model, optimizer_state = part.own_part(model, optimizer_state, self.optimizer)
        return model, optimizer_state

    def _owners(self, *, shards_states: bool) -> Owners:
        """Return the ranks that hold one model between them. shards_states: ZeRO divides it over the replicas, too."""
        parts = [part for part in self.parts if not (shards_states and part.lies_in_replicas)]
        names: set[AxisName] = {part.axis_name for part in parts}
        axis = self.axes[_COMMON_AXES.get(frozenset(names | ({"replicas"} if shards_states else set())), "world")]
        # The world has a copy for each replica, unless replicas have pieces.
        copies = self.replicas if axis is self.axes.world and not shards_states else None

        def counts(parameter: Tensor) -> bool:
            is_first_copy = copies is None or copies.is_first
            return is_first_copy and all(part.counts(parameter) for part in parts)

        return Owners(axis, counts)

    def _clipping(self, owners: Owners) -> Callable[[float], Tensor]:
        """Return what clips gradients, by how they are divided."""
        if self._sharded is not None:
            return self._sharded.clip_grad_norm_
        if not self.parts:
            return self._clip_own
        if len(self.parts) == 1 and self.parts[0].clip_alone is not None:
            return self.parts[0].clip_alone
        return partial(self._clip_divided, owners)

    def _clip_own(self, max_norm: float) -> Tensor:
        """Clip gradients that this rank has whole."""
        if isinstance(self.optimizer, LowBitOptimizer) and self.optimizer.released is not None:
            return self.optimizer.released.norm()  # nothing is left to clip, which no job asks for
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def _clip_divided(self, owners: Owners, max_norm: float) -> Tensor:
        """Clip gradients that are divided over the ranks."""
        gradients: dict[Tensor, Tensor] = {
            parameter: parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
        }
        return clip_together(gradients, max_norm, owners.counts, owners.axis)


def as_many_passes(batches: Iterable[T], axis: Axis, take_part: Callable[[], None]) -> Iterator[T]:
    """Yield the batches, for a forward pass each; then take part in the passes of ranks of the axis that have more."""

    def is_any_left(has_batch: bool) -> bool:
        return bool(axis.max_(torch.tensor(float(has_batch), device=axis.device)))  # waits for the device

    for batch in batches:
        is_any_left(True)
        yield batch
    while is_any_left(False):
        take_part()


def late_state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer, without a wait of the host."""
    return optimizer.late_state_dict() if isinstance(optimizer, LowBitOptimizer) else optimizer.state_dict()


# The numbers on which ranks that train one model agree in each step, so that they all hold the same codes.
#
# Before the optimizer's step: the amaxes of operands, which become the largest of all ranks that hold the same layers (as in
# Transformer Engine's `reduce_amax`), and sampled statistics, which decide on demotions and become their mean. What they agree
# on about weights and gradients is in `optim/shards.py`.


def agree_on_amaxes(model: nn.Module, stage: Axis, apart: Mapping[nn.Module, Axis]) -> None:
    """Share amaxes and samples over the axis. All ranks quantize and sample the same operands in the same steps.

    apart: the axes of modules that not all of its ranks hold alike.
    """
    scalings: dict[Axis, list[OperandScaling]] = {}
    for module in model.modules():
        if isinstance(module, OperandScaling):
            scalings.setdefault(apart.get(module, stage), []).append(module)
    for axis, alike in scalings.items():
        if axis.size > 1:
            _agree(alike, axis)


def _agree(scalings: Sequence[OperandScaling], axis: Axis) -> None:
    amaxes = [scaling.step_amax for scaling in scalings if scaling.recipe.amax_history_length]
    if amaxes:
        _reduce(amaxes, axis.max_)  # an infinity restarts a history as NaN does
    samples = [scaling.sample for scaling in scalings if scaling.is_sampled]
    if samples:
        _reduce(samples, lambda flat: axis.sum_(flat) / axis.size)


def _reduce(tensors: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> None:
    """Reduce many small tensors as one tensor, in place."""
    reduced = reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    parts = reduced.split([tensor.numel() for tensor in tensors])
    foreach_copy_(tensors, [part.view_as(tensor) for tensor, part in zip(tensors, parts, strict=True)])


# Read whole parameters of a model that ranks divide: the one reader of `plain_state_dict`, `export` and state dicts.
#
# A parameter at a time is gathered, as precisely as the ranks hold it: from pieces of its master weight or residual (ZeRO),
# from its shards (tensor degree), or as it is. Experts are gathered by stack. Each call is a collective; every rank gets the
# result.


class WholeParameters:
    """Reads parameters over the ranks that hold them. Does not keep what it reads from alive."""

    def __init__(self, sharded: ShardedStates | None, shards: TensorShards, experts: DividedExperts | None) -> None:
        self._sharded, self._shards = None if sharded is None else ref(sharded), ref(shards)
        self._experts = None if experts is None else ref(experts)

    def values(self, parameter: Tensor) -> Tensor:
        """Return a parameter's values: fp32 of codes, else in its dtype."""
        sharded = None if self._sharded is None else self._sharded()
        own = OwnParameters().values(parameter) if sharded is None else sharded.values(parameter)
        return self._joined(parameter, own)

    def codes(self, weight: Float8Weight) -> Tensor:
        """Return a weight's codes."""
        sharded = None if self._sharded is None else self._sharded()
        return self._joined(weight, weight.codes.detach() if sharded is None else sharded.codes(weight))

    def stack(self, own: Tensor) -> Tensor:
        """Return the matrices of all ranks, given this rank's of a stack that the ranks divide."""
        experts = None if self._experts is None else self._experts()
        return own if experts is None else experts.axis.start_gather(own).wait().flatten(0, 1)

    def _joined(self, parameter: Tensor, own: Tensor) -> Tensor:
        shards = self._shards()
        cut = None if shards is None else shards.cuts.get(parameter)
        if shards is None or cut is None:
            return own
        return cut.join(list(shards.axis.start_gather(own.contiguous()).wait()))


def read_over_ranks(
    model: nn.Module, sharded: ShardedStates | None, shards: TensorShards, experts: DividedExperts | None
) -> None:
    """Let a model that ranks divide be read whole."""
    if sharded is not None or shards.cuts or experts is not None:
        set_reader(model, WholeParameters(sharded, shards, experts))
