"""Tensor parallelism: each rank of the tensor axis holds a shard of every layer in the model's plan, and of its states.

Layers are cut after the model was converted: codes, residuals and master weights are cut as they are, so that shards have
the scale of the whole weight, and they keep one scale as the optimizer steps them (`scales.py`). Whoever joins the shards gets
the whole weight's codes. A shard is a new parameter, since autograd remembers the shape of one that it has seen.

The plan of a model says how each layer is cut: by globs of names, see `plans.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from worker.blocks import repeated_blocks
from worker.fp8.bf16 import HalfLinear
from worker.fp8.gradient import RoundingPosition
from worker.fp8.layout import layout_of
from worker.fp8.linear import Float8Linear
from worker.fp8.loss_scaling import STATE_BUFFER
from worker.mesh import Axis, Cut, SavedStates, TensorInPieces
from worker.mesh.saved import changed
from worker.models.model import Part, TensorRole, TrainedModel
from worker.optim.shards import check_unused, decoded, hold_shards
from worker.parallel.axes import Axes
from worker.parallel.plans import Plan
from worker.parallel.sequence import LAYER_ROLES, check_sequence, divide_tokens
from worker.parallel.tensor_layers import surround

STATE_NAMES = ("weight", "weight_codes", "weight_residual", "bias")
"""Under which a state dict of any level holds a layer's tensors that are cut."""


@dataclass(eq=False)
class TensorShards:
    """What the ranks of the tensor axis divide of a model: on one rank, nothing.

    cuts: of the parameters that are shards. names: of tensors of the model's state dict, at any level, with their cuts.
    token_shares: into how many shares of the tokens the activations between two blocks are divided.
    """

    axes: Axes
    cuts: dict[Tensor, Cut] = field(default_factory=dict)
    names: dict[str, Cut] = field(default_factory=dict)
    token_shares: int = 1

    @property
    def axis(self) -> Axis:
        """The ranks that each hold a shard."""
        return self.axes.tensor

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank's copy counts where ranks add up what they hold: a replicated parameter counts once."""
        return not self.cuts or self.axis.is_first or parameter in self.cuts

    def mark(
        self, model: dict[str, Any], optimizer_state: dict[str, Any], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return state dicts that say of each tensor, for a checkpoint, which shard it is; of the others, one rank's counts."""
        if not self.cuts:
            return model, optimizer_state
        model = {name: self._marked(held, self.names.get(name)) for name, held in model.items()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        wholes = {piece: parameter for parameter, piece in getattr(optimizer, "pieces", {}).items()}
        states = {}
        for number, state in optimizer_state["state"].items():
            cut = self.cuts.get(wholes.get(held[number], held[number]))
            states[number] = {
                name: {part: self._marked(entries, cut) for part, entries in value.items()}
                if isinstance(value, dict)
                else self._marked(value, cut)
                for name, value in state.items()
            }
        return model, optimizer_state | {"state": states}

    def cut_saved(
        self, model: dict[str, Any], optimizer_state: dict[str, Any], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state dicts with this rank's shards where they hold whole tensors; shards stay as they are."""
        whole = [name for name, cut in self.names.items() if name in model and model[name].shape == cut.whole_shape]
        if not whole:
            return model, optimizer_state
        cuts, rank = {name: self.names[name] for name in whole}, self.axis.rank
        model = model | {name: changed(model[name], partial(cut.shard, rank=rank), cut.shape) for name, cut in cuts.items()}
        optimizer_state = decoded(optimizer_state)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        keys = [key for group in optimizer_state["param_groups"] for key in group["params"]]
        wholes = {piece: parameter for parameter, piece in getattr(optimizer, "pieces", {}).items()}
        found = {key: self.cuts.get(wholes.get(parameter, parameter)) for parameter, key in zip(held, keys, strict=True)}
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
        """A leaf of a state dict, as this rank has it."""
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
    parts: Sequence[Part] = (),
) -> TensorShards:
    """Let this rank hold its shards of a converted model and of its optimizer. All ranks hold the same whole before.

    sequence: inside of blocks, activations between the layers are divided along their tokens. parts: the stages of a pipeline
    that the model has been cut down to.
    Raises ValueError, before anything is changed, for a size that does not divide, a role that a module cannot have, a glob
    that matches nothing, a compiled model, one that scales losses, and an optimizer that has taken steps.
    """
    shards, axis = TensorShards(axes, token_shares=axes.tensor.size if sequence else 1), axes.tensor
    if axis.size == 1:
        return shards
    check_unused(optimizer)
    check_model(model, "tensor")
    check_compiled(model, "sequence" if sequence else "a tensor degree", allows_blocks=not sequence)
    roles = _roles(model, plan)
    if sequence:
        check_sequence(model, roles)
    found: dict[nn.Parameter, Cut] = {}
    for name, role in roles.items():
        if role != "partial-gradients":
            for part, cut in _cuts(model.get_submodule(name), name, role, axis.size).items():
                found[model.get_submodule(name).get_parameter(part)] = cut
                shards.names |= {f"{name}.{own}": cut for own in (STATE_NAMES[:3] if part == "weight" else (part,))}
    new = {whole: _shard(whole, cut, axis.rank) for whole, cut in found.items()}
    for name, role in roles.items():
        module = model.get_submodule(name)
        _divide(module, role, axis, new, found)
        if not (sequence and role in LAYER_ROLES):
            surround(module, role, axis)
    if sequence:
        divide_tokens(model, roles, axis, parts)
    hold_shards(optimizer, new, found, axis.rank)
    shards.cuts = {new[whole]: cut for whole, cut in found.items()}
    _share_rounding(model, shards)
    if isinstance(model, TrainedModel) and "head" in roles.values():
        model.vocabulary = axis
    return shards


def check_model(model: nn.Module, degree: str) -> None:
    """Raise ValueError for a model that scales its losses. degree: by which its activations are divided."""
    if any(name.rpartition(".")[2] == STATE_BUFFER for name, _ in model.named_buffers()):
        raise ValueError(
            f"the model scales its losses (fp16-amp); allowed with a {degree} degree: levels without loss scaling. "
            "Use bf16-amp."
        )


def check_compiled(model: nn.Module, degree: str, *, allows_blocks: bool = False) -> None:
    """Raise ValueError for a model that is compiled, or of which more than its repeated blocks is, where these may be.

    degree: by which its activations are divided.
    """
    allowed = set(repeated_blocks(model)) if allows_blocks else set[nn.Module]()
    if any(module._compiled_call_impl is not None for module in model.modules() if module not in allowed):
        what = "compiled blocks, from compile_blocks" if allows_blocks else "models that are not"
        raise ValueError(
            f"the model, or a part of it, is compiled; allowed with {degree}: {what}, since no graph of torch can follow what "
            "ranks exchange elsewhere. Leave compile out."
        )


def _roles(model: nn.Module, plan: Plan) -> dict[str, TensorRole]:
    """The modules of the plan by name."""
    names = [name for name, _ in model.named_modules()]
    roles = {name: role for glob, role in plan.items() for name in names if fnmatchcase(name, glob)}
    if unmatched := [glob for glob in plan if not any(fnmatchcase(name, glob) for name in names)]:
        raise ValueError(f"the plan's {unmatched[0]!r} matches no module of the model. Correct the glob, or leave it out.")
    return roles


def _cuts(module: nn.Module, name: str, role: TensorRole, num_shards: int) -> dict[str, Cut]:
    """How the module's parameters are cut, by their names in it."""
    is_embedding = isinstance(module, nn.Embedding)
    is_linear = isinstance(module, (Float8Linear, HalfLinear)) or layout_of(module) is not None
    if not (is_embedding if role == "embedding" else is_linear):
        raise ValueError(
            f"the plan makes {name} ({type(module).__name__}) a {role}; allowed: embeddings as embedding, linear layers of "
            "Octet, torch and transformers otherwise. Change the plan, or the level: torchao's layers cannot be cut."
        )
    layout = layout_of(module)
    is_transposed = getattr(module, "is_transposed", layout is not None and layout.is_transposed)
    dim = int((role == "row") != is_transposed)
    groups = 3 if role == "column of 3" else 1
    try:
        cuts = {"weight": Cut.of(module.get_parameter("weight"), dim, groups, num_shards)}
        if module._parameters.get("bias") is not None and role != "row":
            cuts["bias"] = Cut.of(module.get_parameter("bias"), 0, groups, num_shards)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return cuts


def _shard(whole: nn.Parameter, cut: Cut, rank: int) -> nn.Parameter:
    """A rank's shard as a parameter of its own: autograd remembers the shape of one that it has seen."""
    shard = nn.Parameter(cut.shard(whole.detach(), rank), requires_grad=whole.requires_grad)
    shard.grad_dtype = whole.grad_dtype
    shard.num_shards = cut.num_shards  # by which reports count the whole model
    return shard


def _divide(
    module: Any, role: TensorRole, axis: Axis, new: Mapping[nn.Parameter, nn.Parameter], cuts: Mapping[nn.Parameter, Cut]
) -> None:
    """Give a module its shards."""
    if role == "partial-gradients":
        return
    if isinstance(module, Float8Linear) and module.weight_residual is not None:
        module.weight_residual = cuts[module.weight].shard(module.weight_residual, axis.rank)
    for name, parameter in list(module._parameters.items()):
        if parameter in new:
            setattr(module, name, new[parameter])
    for name in ("in_features", "nx") if role == "row" else ("out_features", "nf", "num_embeddings"):
        if hasattr(module, name):
            setattr(module, name, getattr(module, name) // axis.size)
    if isinstance(module, Float8Linear):
        module._prepare_gradient()


def _share_rounding(model: nn.Module, shards: TensorShards) -> None:
    """Let each shard round its FP8 gradients with numbers of its own; ranks with the same weight keep the same numbers."""
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and layer.gradient_position is not None and layer.weight in shards.cuts:
            position: RoundingPosition = layer.gradient_position
            position.share = position.share * shards.axis.size + shards.axis.rank
            position.num_shares *= shards.axis.size
