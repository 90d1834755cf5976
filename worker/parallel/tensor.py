"""Tensor parallelism: each rank of the tensor axis holds a shard of every layer in the model's plan, and of its states.

Layers are cut after the model was converted: codes, residuals and master weights are cut as they are, so that shards have
the scale of the whole weight, and they keep one scale as the optimizer steps them (`parallel.py`). Joined shards are the whole
weight's codes. A shard is a new parameter, since autograd remembers the shape of one that it has seen.

The plan of a model has the role of each layer (`tensor_plan.py`). With `sequence` the ranks also divide tokens (`sequence.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.weight import Float8Weight, is_float8_weight
from octet.worker.mesh import Axes, Axis, Cut, SavedStates, TensorInPieces
from octet.worker.mesh.saved import changed
from octet.worker.models.model import Part, TensorRole, TrainedModel
from octet.worker.optim import LowBitOptimizer
from octet.worker.optim.sharding import check_unused, decoded, hold_shards
from octet.worker.optim.shards import agree_on_weight_scales
from octet.worker.parallel.sequence import COLUMN_ROLES, LAYER_ROLES, check_sequence, divide_tokens
from octet.worker.parallel.strategy import DividedModel, Division, Strategy, check_compiled, check_loss_scaling
from octet.worker.parallel.tensor_layers import SharedInput, surround
from octet.worker.parallel.tensor_plan import Plan, check_heads, cuts_of, held_part, plan_of, roles_of

STATE_NAMES = ("weight", "weight_codes", "weight_residual", "bias")
"""Names under which a state dict of any level holds a layer's tensors that are cut."""


class TensorParallel(Strategy):
    """Ranks divide each layer of the plan, and read the same samples."""

    axis = "tensor"

    def check(self, division: Division) -> None:
        """Resolve the plan. Refuse models without one, and heads that do not divide."""
        division.plan = plan_of(division.model, division.plan)
        check_heads(division.model, division.axes.tensor.size)

    def apply(self, division: Division) -> None:
        """Cut what earlier strategies have left of the model."""
        model, before = division.model, list(division.model.parameters())
        plan = plan_of(model, division.plan)
        shards = cut_model(
            model,
            division.optimizer,
            division.axes,
            held_part(plan, model) if division.runs else plan,
            sequence=division.sequence,
            runs=division.runs,
        )
        shards.has_sharded_logits = "head" in plan.values()
        replaced: dict[Tensor, nn.Parameter] = dict(zip(before, model.parameters(), strict=True))
        for part in division.parts:
            part.follow(replaced)
        division.parts.append(shards)


@dataclass(eq=False)
class TensorShards(DividedModel):
    """This rank's shards of a model; none on an axis of one rank.

    cuts: of the parameters that are shards. names: of tensors of the model's state dict, at any level, with their cuts.
    has_sharded_logits: each rank has the logits of some tokens of the vocabulary.
    """

    axis_name = "tensor"

    axes: Axes
    cuts: dict[Tensor, Cut] = field(default_factory=dict)
    names: dict[str, Cut] = field(default_factory=dict)
    has_sharded_logits: bool = False

    @property
    def axis(self) -> Axis:
        """The ranks that each hold a shard."""
        return self.axes.tensor

    def counts(self, parameter: Tensor) -> bool:
        """Return True for a shard, and on the first rank for a parameter that all ranks hold."""
        return self.axis.is_first or parameter in self.cuts

    def own_values(self, parameter: Tensor, values: Tensor) -> Tensor:
        """Return this rank's shard of a parameter's values."""
        cut = self.cuts.get(parameter)
        return values if cut is None else cut.part(values, self.axis.rank)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give all shards of a weight one scale."""
        if isinstance(optimizer, LowBitOptimizer):
            weights = [optimizer.quantized[shard] for shard in self.cuts if shard in optimizer.quantized]
            agree_on_weight_scales(optimizer, weights, None, self.axis)

    def mark(
        self, model: dict[str, Any], optimizer_state: dict[str, Any], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return state dicts with each shard's place in its whole tensor. The first rank's copy of any other tensor counts."""
        if not self.cuts:
            return model, optimizer_state
        model = {name: self._marked(held, self.names.get(name)) for name, held in model.items()}
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        wholes = {piece: parameter for parameter, piece in getattr(optimizer, "pieces", {}).items()}
        states = {}
        for number, state in optimizer_state["state"].items():
            cut = self.cuts.get(wholes.get(stepped[number], stepped[number]))
            states[number] = {
                name: {part: self._marked(held, cut) for part, held in value.items()}
                if isinstance(value, dict)
                else self._marked(value, cut)
                for name, value in state.items()
            }
        return model, optimizer_state | {"state": states}

    def own_part(
        self, model: dict[str, Any], optimizer_state: dict[str, Any], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state dicts with this rank's shards where they hold whole tensors; shards stay as they are."""
        whole = [name for name, cut in self.names.items() if name in model and model[name].shape == cut.whole_shape]
        if not whole:
            return model, optimizer_state
        cuts, rank = {name: self.names[name] for name in whole}, self.axis.rank
        model = model | {name: changed(model[name], partial(cut.shard, rank=rank), cut.shape) for name, cut in cuts.items()}
        optimizer_state = decoded(optimizer_state)
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        keys = [key for group in optimizer_state["param_groups"] for key in group["params"]]
        wholes = {piece: parameter for parameter, piece in getattr(optimizer, "pieces", {}).items()}
        found = {key: self.cuts.get(wholes.get(parameter, parameter)) for parameter, key in zip(stepped, keys, strict=True)}
        changes = {key: partial(self._cut_state, cut=cut) for key, cut in found.items() if cut is not None}
        states = optimizer_state["state"]
        if isinstance(states, SavedStates):
            states = states.changed(changes)
        else:
            states = {key: changes[key](state) if key in changes else state for key, state in states.items()}
        return model, optimizer_state | {"state": states}

    def _cut_state(self, state: dict[str, Any], cut: Cut) -> dict[str, Any]:
        return {name: self._cut_parts(value, cut) for name, value in state.items()}

    def _cut_parts(self, value: Any, cut: Cut) -> Any:
        if not isinstance(value, dict):
            return value
        codes = cut.shard(value["codes"].view(cut.whole_shape), self.axis.rank).view(-1)
        return value | {"codes": codes}

    def _marked(self, held: Any, cut: Cut | None) -> Any:
        """Return a leaf of a state dict with its place, as this rank has it."""
        if isinstance(held, TensorInPieces):
            counts = cut is not None or self.axis.is_first
            return replace(held, own=held.own if counts else held.own[:0], stride=self.axis.size, cut=cut)
        if cut is None or not isinstance(held, Tensor) or held.dim() == 0:
            return held
        own = held.detach().reshape(-1)
        place = (0, own.numel())
        return TensorInPieces(own if self.axes.replicas.is_first else own[:0], tuple(held.shape), (place,), self.axis.size, cut)


@torch.no_grad()
def cut_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    axes: Axes,
    plan: Plan,
    *,
    sequence: bool = False,
    runs: Sequence[Part] = (),
) -> TensorShards:
    """Let this rank hold its shards of a converted model and of its optimizer. All ranks hold the same whole before.

    sequence: inside of blocks, activations between the layers are divided along their tokens. runs: the runs of blocks that
    this rank computes in one go, where a pipeline divides the model.
    Raises ValueError, before anything is changed, for a size that does not divide, a role that a module cannot have, a glob
    that matches nothing, a compiled model, one that scales losses, and an optimizer that has taken steps.
    """
    shards, axis = TensorShards(axes), axes.tensor
    if axis.size == 1:
        return shards
    check_unused(optimizer)
    check_loss_scaling(model, "a tensor degree")
    check_compiled(model, "sequence" if sequence else "a tensor degree", allows_blocks=not sequence)
    roles = roles_of(model, plan)
    if sequence:
        check_sequence(model, roles)
    cuts: dict[nn.Parameter, Cut] = {}
    for name, role in roles.items():
        if role != "partial-gradients":
            for held, cut in cuts_of(model.get_submodule(name), name, role, axis.size).items():
                cuts[model.get_submodule(name).get_parameter(held)] = cut
                shards.names |= {f"{name}.{own}": cut for own in (STATE_NAMES[:3] if held == "weight" else (held,))}
    new = {whole: _shard(whole, cut, axis.rank) for whole, cut in cuts.items()}
    siblings = Counter(name.rpartition(".")[0] for name, role in roles.items() if role in COLUMN_ROLES)
    shared = {parent: SharedInput(num_layers) for parent, num_layers in siblings.items()}
    for name, role in roles.items():
        module = model.get_submodule(name)
        _divide(module, role, axis, new, cuts)
        if not (sequence and role in LAYER_ROLES):
            surround(module, role, axis, shared.get(name.rpartition(".")[0]) if role in COLUMN_ROLES else None)
    if sequence:
        divide_tokens(model, roles, axis, runs)
    hold_shards(optimizer, new, cuts, axis.rank)
    shards.cuts = {new[whole]: cut for whole, cut in cuts.items()}
    for shard in shards.cuts:
        if is_float8_weight(shard):
            shard.state.reduce_amax = axis.max_
    _share_rounding(model, shards)
    if isinstance(model, TrainedModel) and "head" in roles.values():
        model.vocabulary = axis
    return shards


def _shard(whole: nn.Parameter, cut: Cut, rank: int) -> nn.Parameter:
    """A rank's shard as a parameter of its own: autograd remembers the shape of one that it has seen."""
    if is_float8_weight(whole):
        residual = None if whole.residual is None else cut.shard(whole.residual, rank)
        numbers = whole.dequant_scale.clone(), whole.values_amax.clone()
        values: Tensor = Float8Weight(cut.shard(whole.codes, rank), *numbers, residual)
    else:
        values = cut.shard(whole.detach(), rank)
    shard = nn.Parameter(values, requires_grad=whole.requires_grad)
    shard.grad_dtype = whole.grad_dtype
    shard.num_shards = cut.num_shards  # reports count the whole model by it
    return shard


def _divide(
    module: Any, role: TensorRole, axis: Axis, new: Mapping[nn.Parameter, nn.Parameter], cuts: Mapping[nn.Parameter, Cut]
) -> None:
    """Give a module its shards."""
    if role == "partial-gradients":
        return
    for name, parameter in list(module._parameters.items()):
        if parameter in new:
            setattr(module, name, new[parameter])
    for name in ("in_features", "nx") if role == "row" else ("out_features", "nf", "num_embeddings"):
        if hasattr(module, name):
            setattr(module, name, getattr(module, name) // axis.size)
    if isinstance(module, Float8Linear):
        module.prepare_gradient()


def _share_rounding(model: nn.Module, shards: TensorShards) -> None:
    """Let each shard round its FP8 gradients with numbers of its own; ranks with the same weight keep the same numbers."""
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and layer.gradient_position is not None and layer.weight in shards.cuts:
            position: RoundingPosition = layer.gradient_position
            position.share = position.share * shards.axis.size + shards.axis.rank
            position.num_shares *= shards.axis.size
