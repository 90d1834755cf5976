"""The data of a low-bit optimizer: for each parameter its stored weight, its range of elements, and its states.

This is a torch optimizer without a step. `optimizer.py` steps the parameters, by kernels or by plain
torch; `sharding.py` changes which elements a rank holds; `held` returns a read-only view of one
parameter.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.common.deferred import is_deferred
from octet.worker.fp8.casts import TRAINABLE_DTYPES
from octet.worker.fp8.fsdp import is_shard, load_into_shard
from octet.worker.fp8.weight import Float8Weight, stored
from octet.worker.kernels.rounding import NUMBERS_PER_DRAW
from octet.worker.kernels.torch_private import STEP_HOOKS, local_of
from octet.worker.metrics.readback import DeferredValue, HostCopy
from octet.worker.optim.codecs import CODECS, Codec, Draw, Parts, StoredState, zeros
from octet.worker.optim.host_states import HostStates
from octet.worker.optim.origin import MIN_QUANTIZED_ELEMENTS, Origin, is_small
from octet.worker.optim.rules.rule import Defaults, Group, Rule
from octet.worker.optim.shards import (
    CUT,
    NUMBERS,
    Shards,
    as_shards,
    check_parts,
    check_states,
    copy_parts,
    entries_of_piece,
    local_parts,
    origin_of,
    take_rows,
    wrong_dtype,
)
from octet.worker.optim.weights import (
    Bf16Weight,
    CodesWeight,
    Fp32Weight,
    MasterWeight,
    QuantizedWeight,
    SplitWeight,
    StoredWeight,
    is_rounding,
    is_stale,
    link_master,
    new_master,
    settle,
)


@dataclass(frozen=True, eq=False)
class HeldParameter:
    """A parameter with what the optimizer keeps for it. The tensors are the optimizer's own: a step changes them in place.

    parameter: of the model; under ZeRO a 1-D piece of it, of codes where `weight` is not None.
    state: by name the stored states, dicts of tensors, and `step`; empty before they are allocated.
    codecs: the name of each state's codec, in the rule's order.
    """

    parameter: Tensor
    group: Group
    origin: Origin
    state: Mapping[str, Any]
    codecs: tuple[str, ...]
    weight: QuantizedWeight | None

    @property
    def dequant_scale(self) -> Tensor | None:
        """The scale of the codes, fp32 (); None for a plain parameter."""
        return None if self.weight is None else self.weight.dequant_scale

    @property
    def amax(self) -> Tensor | None:
        """The largest magnitude of the whole weight's values, fp32 (); None for a plain parameter."""
        return None if self.weight is None else self.weight.amax

    @property
    def residual(self) -> Tensor | None:
        """The INT8 digits that E4M3 codes round away, for the elements that are stepped; None where nothing holds them."""
        return None if self.weight is None else self.weight.residual

    @property
    def master(self) -> Parts | None:
        """The master weight, flat FP16 codes with one scale; None where the codes are fine enough to be trained."""
        master: Parts | None = self.state.get("master_weights")
        return master


def part_of_state(saved: Any, index: int, num_parts: int, codec_name: str) -> Any:
    """Return what was saved of one of several matrices that had one state, such as a moment, or the count of steps.

    Entries of codes are taken as they are; where the whole is large and a part small, their values. Raises ValueError if the
    parts do not begin with a block of the codec.
    """
    if not isinstance(saved, dict) and (not isinstance(saved, Tensor) or saved.dim() == 0):
        return saved
    parts = saved if isinstance(saved, dict) else {"codes": saved.reshape(-1)}
    num_elements = parts["codes"].numel()
    elements = range(index * num_elements // num_parts, (index + 1) * num_elements // num_parts)
    is_large = num_elements >= MIN_QUANTIZED_ELEMENTS
    codec = CODECS[codec_name if is_large else "fp32"]
    if is_large and len(elements) < MIN_QUANTIZED_ELEMENTS:
        return {"codes": codec.decode(parts)[elements.start : elements.stop].clone()}
    if any(elements.start % part.num_elements for part in codec.parts.values()):
        raise ValueError(
            f"a saved state of {num_parts} matrices has {num_elements} elements in {codec_name}; allowed: matrices that begin "
            "with a block of scales. Start from an export of the checkpoint."
        )
    return {name: codec.parts[name].select(held, elements).clone() for name, held in parts.items()}


WRITE_STREAM = 1 << 30
"""The first random stream of writes from outside; those below are of steps, those from 1 << 31 of gradients."""


class SharedMatrices(Protocol):
    """Gives every rank the whole of matrices whose elements the ranks divide. All ranks make the same calls, in one order."""

    def due(self, updates: list[tuple[Tensor, Group]]) -> list[tuple[Tensor, Group]]:
        """Return this rank's updates, with the matrices that only other ranks step: each takes part in the gather."""

    def join(self, piece: Tensor, own: Tensor) -> Tensor:
        """Return all elements of a piece's matrix, 1-D. own: those of this rank, 1-D, maybe none."""


class OptimizerStates(torch.optim.Optimizer):
    """The parameters, stored weights and states of a `LowBitOptimizer`, which documents the arguments."""

    rule: ClassVar[Rule]
    host_states: HostStates | None = None
    """Keeps the states in host memory, where `offload_optimizer` was called."""
    matrices: SharedMatrices | None = None
    """Puts matrices together whose elements ranks divide (ZeRO); None where this optimizer holds all elements."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: Defaults | None = None,
        *,
        seed: int = 0,
        all_ranks_finite: Callable[[Tensor], Tensor] | None = None,
        fused: bool | None = None,
        **unknown: Any,
    ) -> None:
        """unknown: hyperparameters that a wrapper, such as torch's ZeroRedundancyOptimizer, passes on; they are refused."""
        if unknown:
            name, value = next(iter(unknown.items()))
            made = f"{type(self).__name__}(params, {self.rule.defaults.__name__}({name}={value!r}))"
            raise TypeError(
                f"{type(self).__name__} got {name}={value!r}; allowed: hyperparameters in one object, {made}. To divide an "
                "optimizer over ranks, call octet.parallelize(model, optimizer, zero_stage=1) in the place of "
                "ZeroRedundancyOptimizer, which leaves ranks without the master weights that others step."
            )
        defaults = self.rule.defaults() if defaults is None else defaults
        if not isinstance(defaults, self.rule.defaults):
            allowed = self.rule.defaults.__name__
            raise TypeError(f"defaults is a {type(defaults).__name__}; allowed: {allowed}. Pass {allowed}(lr=...).")
        self.seed = seed
        self.all_ranks_finite = all_ranks_finite
        self.fused = fused
        self._num_skipped = torch.zeros((), dtype=torch.int64)
        self._weights: dict[Tensor, QuantizedWeight] = {}
        self._origins: dict[Tensor, Origin] = {}
        self.pieces: dict[Tensor, nn.Parameter] = {}
        """The piece of each parameter of the model that this optimizer holds instead of the parameter (`sharding.py`)."""
        self.shards: Shards | None = None
        """The agreements of ranks that hold shards of torch's FSDP2; None where no parameter is one."""
        super().__init__(params, {field.name: getattr(defaults, field.name) for field in fields(defaults)})

    @property
    def quantized(self) -> Mapping[Tensor, QuantizedWeight]:
        """The weights that are stored as codes, by the parameter or piece that is stepped; read-only."""
        return MappingProxyType(self._weights)

    @property
    def origins(self) -> Mapping[Tensor, Origin]:
        """The elements that each parameter holds; read-only, see `hold`."""
        return MappingProxyType(self._origins)

    def held(self, parameter: Tensor) -> HeldParameter:
        """Return a view of what is held for a parameter of the groups. Raises KeyError for another parameter."""
        origin = self._origins[parameter]
        group = next(group for group in self.param_groups if any(held is parameter for held in group["params"]))
        names = self.codec_names(group)
        codecs = ("fp32",) * len(names) if is_small(origin) else names
        state = MappingProxyType(self.state.get(parameter) or {})
        return HeldParameter(parameter, group, origin, state, codecs, self._weights.get(parameter))

    def add_param_group(self, param_group: Group) -> None:
        """Add a group and allocate its states, but for parameters without memory (`allocate_states`)."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self.rule.check(group)
        for parameter in group["params"]:
            held = local_of(parameter)
            if type(held) is Float8Weight:
                self._weights[parameter] = QuantizedWeight(held, shard=None if held is parameter else parameter)
                held.state.is_stepped = True
            elif parameter.dtype not in TRAINABLE_DTYPES:
                raise ValueError(wrong_dtype(parameter))
            if is_shard(parameter):
                self.shards = Shards() if self.shards is None else self.shards
                self.shards.add(parameter)
            origin = origin_of(parameter, len(self._origins))
            shape = tuple(parameter.shape) if self.rule.of(group).needs_matrices else ()
            self._origins[parameter] = origin._replace(matrix_shape=shape)
            if parameter.requires_grad and not is_deferred(stored(parameter)):
                self.allocate(parameter, group)

    def hold(
        self,
        parameter: Tensor,
        instead_of: Tensor,
        origin: Origin,
        weight: QuantizedWeight | None,
        state: dict[str, Any] | None,
    ) -> None:
        """Hold a parameter in the place of another, which the groups do not name any more, with its weight and states."""
        self.forget(instead_of)
        self._origins[parameter] = origin
        if weight is not None:
            self._weights[parameter] = weight
        if state:
            self.state[parameter] = state

    def forget(self, parameter: Tensor) -> None:
        """Drop what is held for a parameter that the groups do not name any more. The others keep their random streams."""
        self.state.pop(parameter, None)
        self._origins.pop(parameter, None)
        self._weights.pop(parameter, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as torch does; where this holds pieces, also those that wait in the model for an exchange."""
        super().zero_grad(set_to_none)
        for parameter in self.pieces:
            parameter.grad = None

    @property
    def own_residuals(self) -> dict[Tensor, Tensor]:
        """The residuals of pieces that no layer holds as a whole, by piece."""
        own = {
            piece: self._weights[piece].weight.state.own_residual for piece in self.pieces.values() if piece in self._weights
        }
        return {piece: residual for piece, residual in own.items() if residual is not None}

    @property
    def skipped_steps(self) -> Tensor:
        """`num_skipped_steps` as it is held: int64, (), on the device after the first step."""
        return self._num_skipped

    @property
    def num_skipped_steps(self) -> int:
        """Steps that changed nothing because a gradient was not finite. Waits for the device."""
        return int(self._num_skipped)

    def count_step(self, finite: Tensor) -> None:
        """Count a step as skipped unless `finite`, bool (), is true on its device."""
        self._num_skipped = self._num_skipped.to(finite.device).add_(~finite)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict with the seed and the number of skipped steps.

        Its masters follow what the model has loaded since: to load it again, as Accelerate does, would bring back the former.
        """
        return self.late_state_dict() | {"num_skipped_steps": self.num_skipped_steps}

    @torch.no_grad()
    def late_state_dict(self) -> dict[str, Any]:
        """Return `state_dict` with a `DeferredValue` for the number of skipped steps: the host does not wait."""
        if self.host_states is not None:
            self.host_states.synchronize()
        for parameter in self._weights:
            self._follow_writes(parameter)
        state = super().state_dict() | {"seed": self.seed, "num_skipped_steps": DeferredValue(HostCopy(self._num_skipped).read)}
        if self.shards is not None:
            held = [parameter for group in self.param_groups for parameter in group["params"]]
            state["state"] = {
                number: as_shards(held[number], own, self._weights.get(held[number])) for number, own in state["state"].items()
            }
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict of this class, bit for bit, or of a torch optimizer with the same states.

        The codecs and the rules of groups stay those of this optimizer: a state that was stored by another codec is encoded
        again. A master weight that was not saved stays as it is. Raises ValueError for another rule's states and for states in
        other parts.
        """
        kept = [*(f"{name}_codec" for name in self.rule.state_codecs), *self.rule.fixed]
        own_options = [{name: group[name] for name in kept} for group in self.param_groups]
        own_masters = {held: state["master_weights"] for held, state in self.state.items() if "master_weights" in state}
        saved_groups = state_dict["param_groups"]
        super().load_state_dict({"state": {}, "param_groups": saved_groups})  # torch would cast codes to the weight's dtype
        self.seed = state_dict.get("seed", self.seed)
        self._num_skipped.fill_(state_dict.get("num_skipped_steps", 0))
        for group, saved_group, options in zip(self.param_groups, saved_groups, own_options, strict=True):
            group.update(options)
            for parameter, key in zip(group["params"], saved_group["params"], strict=True):
                if key in state_dict["state"]:
                    saved = state_dict["state"][key]
                    saved = self._take_numbers(parameter, saved)
                    master = own_masters.pop(parameter, None)
                    if "master_weights" in saved and parameter in self._weights:
                        self._weights[parameter].weight.state.wide = None
                    elif master is not None:
                        saved = saved | {"master_weights": master}
                    self._load(parameter, group, saved, saved_group)

    def _take_numbers(self, parameter: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        """Bring back the codes of a shard by their saved scale and amax, also where values come later. Returns the rest."""
        numbers, weight = saved.get(NUMBERS), self._weights.get(parameter)
        if numbers is not None and weight is not None and is_shard(parameter):
            state = weight.weight.state
            state.saved_numbers = numbers["dequant_scale"], numbers["amax"]
            load_into_shard(weight.weight, weight.weight.dequantize())
            state.saved_numbers = numbers["dequant_scale"], numbers["amax"]
        return {name: value for name, value in saved.items() if name != NUMBERS}

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold; torch's own drops every attribute that it does not know."""
        own = [
            "seed",
            "all_ranks_finite",
            "fused",
            "_num_skipped",
            "_weights",
            "_origins",
            "pieces",
            "shards",
            "host_states",
            "matrices",
        ]
        return super().__getstate__() | {name: getattr(self, name) for name in (*own, *STEP_HOOKS)}

    @torch.no_grad()
    def follow_weight(self, parameter: Tensor) -> None:
        """Let the states follow a parameter that was moved or loaded, as each step does first. ValueError if it was cast."""
        if parameter not in self._origins:
            raise ValueError(
                "a parameter group holds a parameter that the optimizer was not given: it was replaced after initialize, as "
                "Accelerate does for FSDP2. Use octet.parallelize in the place of FSDP, or add what is new by add_param_group."
            )
        weight, state = self._weights.get(parameter), self.state.get(parameter)
        held: Any = local_of(parameter)
        if weight is not None and is_shard(parameter) and held.state is not weight.weight.state:  # it was moved
            weight.weight, held.state.is_stepped, held.state.has_new_codes = held, True, True
        if weight is None and parameter.dtype not in TRAINABLE_DTYPES:
            raise ValueError(wrong_dtype(parameter))
        if weight is not None and weight.weight.state.is_replaced:
            raise ValueError(
                "a layer holds another parameter than the optimizer: its weight was assigned after initialize. Write into the "
                "parameter (layer.weight.copy_(values)), or call initialize after what replaces parameters."
            )
        if not state:
            return
        if weight is not None:
            weight.weight.state.check_has_own_memory()
            self._follow_writes(parameter)
        held = state[next(iter(self.rule.state_codecs))]["codes"]
        if self.host_states is None and held.device != parameter.device:
            for name, value in state.items():
                if isinstance(value, dict):
                    state[name] = copy_parts(value, parameter.device)
            if weight is not None and weight.needs_master:
                link_master(weight, state["master_weights"])
            state["step"] = self._new_step_count(parameter, int(state["step"]))

    def _follow_writes(self, parameter: Tensor) -> None:
        """Take over what was written into a weight from outside, and make its master of it, since the last step."""
        weight, state = self._weights[parameter], self.state.get(parameter)
        if not state:
            return
        if not weight.needs_master:
            if weight.weight.state.wide is not None:
                settle(weight, self._draw_for_write(parameter))
        elif is_stale(state["master_weights"], weight):
            master, held = new_master(weight, self._draw_for_write(parameter)), state["master_weights"]
            if all(part.device == held[name].device for name, part in master.items()):
                for name, part in master.items():  # in place: graphs may have captured the address
                    held[name].copy_(part)
                master = link_master(weight, held)
            state["master_weights"] = master
        elif weight.weight.state.master is not state["master_weights"]:  # of a copied model and optimizer
            link_master(weight, state["master_weights"])

    def _draw_for_write(self, parameter: Tensor) -> Draw:
        """Return the random numbers by which a write from outside is rounded before the parameter's next step."""
        return self._draw(parameter, WRITE_STREAM + self.first_stream(parameter))

    def is_fused(self, parameter: Tensor) -> bool:
        """Return True if kernels step the parameter; the host does not wait for them. None steps a whole matrix."""
        if self._origins[parameter].matrix_shape:
            return False
        starts_a_draw = self._origins[parameter].first_draw % NUMBERS_PER_DRAW == 0  # kernels use whole draws
        parameter = stored(parameter)
        wanted = parameter.is_cuda if self.fused is None else self.fused
        return wanted and parameter.is_contiguous() and starts_a_draw

    def _new_step_count(self, parameter: Tensor, num_steps: int) -> int | Tensor:
        """The number of steps; on the device where the kernels count them."""
        if not self.is_fused(parameter):
            return num_steps
        return torch.full((), num_steps, dtype=torch.int64, device=parameter.device)

    def allocate(self, parameter: Tensor, group: Group) -> dict[str, Any]:
        """Allocate a parameter's states, and the master weight that it needs."""
        state = self.zero_states(parameter, group)
        weight = self._weights.get(parameter)
        if weight is not None and weight.needs_master:
            state["master_weights"] = new_master(weight)
        if self.host_states is not None:
            self.host_states.hold(state)
        self.state[parameter] = state
        return state

    def zero_states(self, parameter: Tensor, group: Group) -> dict[str, Any]:
        """Return states before the first step: the number of steps, and dicts of plain tensors."""
        state: dict[str, Any] = {"step": self._new_step_count(parameter, 0)}
        for name in self.rule.of(group).state_codecs:
            state[name] = zeros(self.codec(parameter, group, name), stored(parameter).numel(), parameter.device)
        return state

    def _load(self, parameter: Tensor, group: Group, saved: dict[str, Any], saved_group: Group) -> None:
        """Take over a parameter's saved states."""
        rule = self.rule.of(group)
        check_states(saved, rule)
        state = self.state[parameter] = {"step": self._new_step_count(parameter, int(saved["step"]))}
        for name in rule.state_codecs:
            codec, saved_codec = self.codec(parameter, group, name), self.codec(parameter, saved_group, name)
            parts = saved[name] if isinstance(saved[name], dict) else {"codes": local_of(saved[name]).float().reshape(-1)}
            check_parts(name, parts, saved_codec)
            parts, saved_codec = take_rows(parts, saved.get(CUT), saved_codec)
            state[name] = copy_parts(self._own_entries(parameter, parts, saved_codec), parameter.device)
            if codec is not saved_codec:
                values = saved_codec.decode(state[name])
                state[name] = zeros(codec, values.numel(), parameter.device)
                self.stored_state(parameter, group, name).write(range(values.numel()), values)
        weight = self._weights.get(parameter)
        if weight is not None and weight.needs_master:
            if "master_weights" in saved:
                parts = saved["master_weights"]
                if not is_shard(parts["codes"]):
                    parts = parts | {"codes": parts["codes"].reshape(-1)}  # rows, where a whole shard was saved
                master = copy_parts(self._own_entries(parameter, parts, None), parameter.device)
                state["master_weights"] = master
                if weight.weight.state.wide is None and is_rounding(weight, master):
                    link_master(weight, master)  # else what was loaded waits: the next step makes a master of it
            else:
                state["master_weights"] = new_master(weight)
        if self.host_states is not None:
            self.host_states.hold(state)

    def _own_entries(self, parameter: Tensor, parts: Parts, codec: Codec | None) -> Parts:
        """The entries of saved parts for the elements of a parameter: all, unless it is a piece of what was saved."""
        origin, num_held = self._origins[parameter], stored(parameter).numel()
        if is_shard(parameter):
            parts = local_parts(parts, origin, num_held, codec)
        return entries_of_piece(parts, range(origin.first_element, origin.first_element + num_held), origin.num_elements)

    def codec_names(self, group: Group) -> tuple[str, ...]:
        """Return the codecs of large parameters' states, in the rule's order; torch's groups name none: fp32."""
        return tuple(str(group.get(f"{state}_codec", "fp32")) for state in self.rule.of(group).state_codecs)

    def codec(self, parameter: Tensor, group: Group, state: str) -> Codec:
        """Return the codec of one state of a parameter: fp32 for a small one."""
        return CODECS["fp32" if is_small(self._origins[parameter]) else str(group.get(f"{state}_codec", "fp32"))]

    def first_stream(self, parameter: Tensor) -> int:
        """Return the random stream of the weight; each state of the rule has one of the next."""
        return self._origins[parameter].parameter_index * (1 + len(self.rule.state_codecs))

    def stored_weight(self, parameter: Tensor, group: Group) -> StoredWeight:
        """Return what reads and writes a parameter by runs of elements in the step under way."""
        draw = self._draw(parameter, self.first_stream(parameter))
        weight = self._weights.get(parameter)
        if weight is None:
            held = stored(parameter)
            return Fp32Weight(held) if held.dtype == torch.float32 else Bf16Weight(held, draw)
        shape = self._origins[parameter].matrix_shape
        bound = self.rule.of(group).bound_after_step(weight.amax, int(self.state[parameter]["step"]), group, shape)
        if weight.needs_master:
            return MasterWeight(weight, self.state[parameter]["master_weights"], bound, draw)
        if weight.residual is not None:
            return SplitWeight(weight, bound, draw)
        return CodesWeight(weight, weight.codes, weight.dequant_scale, bound, draw)

    def stored_state(self, parameter: Tensor, group: Group, name: str) -> StoredState:
        """Return what reads and writes one state by runs of elements in the step under way."""
        stream = self.first_stream(parameter) + 1 + list(self.rule.state_codecs).index(name)
        return StoredState(self.codec(parameter, group, name), self.state[parameter][name], self._draw(parameter, stream))

    def _draw(self, parameter: Tensor, stream: int) -> Draw:
        """Return a source of random numbers for this step of a parameter."""
        first, step = self._origins[parameter].first_draw, int(self.state[parameter]["step"])

        def draw(elements: range) -> Tensor:
            shifted = range(first + elements.start, first + elements.stop)
            return kernels.random_bits(self.seed, step, stream, shifted, parameter.device)

        return draw
