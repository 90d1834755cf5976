"""The walker: an optimizer whose states, weights and gradients are held in few bits, and computed in fp32.

It knows how tensors are stored and no arithmetic; a rule (`rule.py`) knows the arithmetic. Only what is stored is rounded: a
step's update uses the states before they are rounded. A step passes over each parameter once, in runs of elements, so that no
tensor is wide as a whole. Rounding is stochastic from a counter (seed, parameter, its step, element), so a resumed or sharded
run draws the same bits.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from worker import kernels
from worker.deferred import is_deferred
from worker.fp8.casts import TRAINABLE_DTYPES
from worker.kernels.rounding import NUMBERS_PER_DRAW
from worker.metrics.readback import HostCopy, Late
from worker.optim.codecs import CODECS, Codec, Draw, Parts, StoredState, zeros
from worker.optim.gradients import GradientReader, all_finite
from worker.optim.origin import Origin, is_small
from worker.optim.rule import Defaults, Group, Rule
from worker.optim.saved_states import check_parts, check_states, copy_parts, entries_of_piece, wrong_dtype
from worker.optim.weights import (
    MasteredWeight,
    QuantizedWeight,
    RoundedWeight,
    ScaledWeight,
    SplitWeight,
    StoredWeight,
    WideWeight,
    is_stale,
    new_master,
    runs,
)

if TYPE_CHECKING:
    from worker.optim.fused import FusedStep
    from worker.optim.offload import HostStates
    from worker.optim.release import GradientRelease
    from worker.optim.watch import Watch


class LowBitOptimizer(torch.optim.Optimizer):
    """A torch optimizer by a rule, with a codec for each of the rule's states, by parameter group.

    params: parameters or groups, as for any torch optimizer; plain fp32, bf16 and fp16 ones are trained as they are.
    defaults: the rule's hyperparameters, where a group has none of its own.
    quantized: parameters stored as codes × dequant_scale. E4M3 codes without a residual get an FP16 master weight.
    all_ranks_finite: given whether this rank's gradients are finite (a 0-dim bool), tells whether those of all ranks are.
    fused: one pass by Triton kernels, for which the host does not wait; by default on CUDA. Parameters that are not contiguous
    are stepped by plain torch everywhere.

    A step with a non-finite gradient changes nothing and is counted in `num_skipped_steps`.
    Raises ValueError for hyperparameters or codecs that the rule does not allow, and TypeError for another rule's defaults.
    """

    rule: ClassVar[Rule]
    released: "GradientRelease | None" = None
    """What steps parameters in the backward pass, if anything does."""
    host_states: "HostStates | None" = None
    """What keeps the states in host memory, if anything does."""
    _watch: "Watch | None" = None
    """Knows the last step's tables while all that they were made of, but for gradients, is where it was."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: Defaults | None = None,
        *,
        quantized: Iterable[QuantizedWeight] = (),
        seed: int = 0,
        all_ranks_finite: Callable[[Tensor], Tensor] | None = None,
        fused: bool | None = None,
    ) -> None:
        defaults = self.rule.defaults() if defaults is None else defaults
        if not isinstance(defaults, self.rule.defaults):
            allowed = self.rule.defaults.__name__
            raise TypeError(f"defaults is a {type(defaults).__name__}; allowed: {allowed}. Pass {allowed}(lr=...).")
        self.seed = seed
        self.all_ranks_finite = all_ranks_finite
        self.fused = fused
        self._num_skipped = torch.zeros((), dtype=torch.int64)
        self._fused_steps: dict[Tensor | None, FusedStep] = {}
        """By the parameter that is stepped alone; None: all others."""
        self._quantized: dict[Tensor, QuantizedWeight] = {weight.codes: weight for weight in quantized}
        self._origins: dict[Tensor, Origin] = {}
        self.pieces: dict[Tensor, nn.Parameter] = {}
        """The piece of each parameter of the model that this optimizer holds instead of the parameter (`pieces.py`)."""
        super().__init__(params, {field.name: getattr(defaults, field.name) for field in fields(defaults)})

    def add_param_group(self, param_group: Group) -> None:
        """Add a group and allocate its states, but for parameters without memory (`later.py`)."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self.rule.check(group)
        for parameter in group["params"]:
            if parameter not in self._quantized and parameter.dtype not in TRAINABLE_DTYPES:
                raise ValueError(f"{wrong_dtype(parameter)} Name codes, and the scale that belongs to them, in `quantized`.")
            self._origins[parameter] = Origin(len(self._origins), 0, parameter.numel())
            if parameter.requires_grad and not is_deferred(parameter):
                self._allocate(parameter, group)

    def set_origin(self, parameter: Tensor, parameter_index: int, first_element: int, num_elements: int) -> None:
        """Say which elements of which parameter a piece holds, so that it draws the random bits of the whole.

        num_elements: of the whole parameter. States that exist keep their codec: call it before the first step.
        """
        self._origins[parameter] = Origin(parameter_index, first_element, num_elements)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, or none if any gradient on any rank is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self._watch is None or not self._watch.is_unchanged(self, updates):
            self._watch = None
            for parameter, _ in updates:
                self._follow(parameter)
        finite = all_finite(parameter.grad for parameter, _ in updates)
        if self.all_ranks_finite is not None:
            finite = self.all_ranks_finite(finite)
        self._update_all(updates, finite)
        if self.released is not None:
            finite = self.released.close(finite)
        self._num_skipped = self._num_skipped.to(finite.device).add_(~finite)
        return loss

    @torch.no_grad()
    def step_parameter(self, parameter: Tensor, group: Group) -> Tensor:
        """Update one parameter by its gradient, unless that is not finite. Returns whether it is, bool (). See `release.py`."""
        self._follow(parameter)
        assert parameter.grad is not None
        finite = all_finite([parameter.grad])
        self._update_all([(parameter, group)], finite, alone=parameter)
        return finite

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as torch does; where this holds pieces, also those that wait in the model for an exchange."""
        super().zero_grad(set_to_none)
        for parameter in self.pieces:
            parameter.grad = None

    @property
    def own_residuals(self) -> dict[Tensor, Tensor]:
        """The residuals of pieces that no layer holds as a whole, by piece."""
        own = {piece: self._quantized[piece].own_residual for piece in self.pieces.values() if piece in self._quantized}
        return {piece: residual for piece, residual in own.items() if residual is not None}

    @property
    def skipped_steps(self) -> Tensor:
        """`num_skipped_steps` as it is held: int64, (), on the device after the first step."""
        return self._num_skipped

    @property
    def num_skipped_steps(self) -> int:
        """Steps that changed nothing because a gradient was not finite. Waits for the device."""
        return int(self._num_skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict with the seed and the number of skipped steps.

        Its masters follow what the model has loaded since: to load it again, as Accelerate does, would bring back the former.
        """
        return self.late_state_dict() | {"num_skipped_steps": self.num_skipped_steps}

    @torch.no_grad()
    def late_state_dict(self) -> dict[str, Any]:
        """Return `state_dict` with a `Late` number of skipped steps: the host does not wait."""
        if self.host_states is not None:
            self.host_states.synchronize()
        for parameter, weight in self._quantized.items():
            self._renew_master(weight, self.state.get(parameter))
        return super().state_dict() | {"seed": self.seed, "num_skipped_steps": Late(HostCopy(self._num_skipped).read)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict of this class, bit for bit, or of a torch optimizer with the same states.

        The codecs stay those of this optimizer: a state that was stored by another codec is encoded again. A master weight
        that was not saved stays as it is. Raises ValueError for another rule's states and for states in other parts.
        """
        codec_names = [f"{name}_codec" for name in self.rule.state_codecs]
        own_codecs = [{name: group[name] for name in codec_names} for group in self.param_groups]
        own_masters = {held: state["master_weights"] for held, state in self.state.items() if "master_weights" in state}
        saved_groups = state_dict["param_groups"]
        super().load_state_dict({"state": {}, "param_groups": saved_groups})  # torch would cast codes to the weight's dtype
        self.seed = state_dict.get("seed", self.seed)
        self._num_skipped.fill_(state_dict.get("num_skipped_steps", 0))
        for group, saved_group, codecs in zip(self.param_groups, saved_groups, own_codecs, strict=True):
            group.update(codecs)
            for parameter, key in zip(group["params"], saved_group["params"], strict=True):
                if key in state_dict["state"]:
                    saved = state_dict["state"][key]
                    master = own_masters.pop(parameter, None)
                    if "master_weights" in saved and parameter in self._quantized:
                        self._quantized[parameter].holder.initial_values = None
                    elif master is not None:
                        saved = saved | {"master_weights": master}
                    self._load(parameter, group, saved, saved_group)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold; torch's own drops every attribute that it does not know."""
        own = ["seed", "all_ranks_finite", "fused", "_num_skipped", "_quantized", "_origins", "pieces", "host_states"]
        own += ["_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"]  # a converted model follows the steps by these
        return super().__getstate__() | {name: getattr(self, name) for name in own} | {"_fused_steps": {}}

    def send_hyperparameters(self) -> None:
        """Bring the groups' hyperparameters on the devices up to date: the replay of a recorded step reads them there."""
        for step in self._fused_steps.values():
            step.send_groups_again(self.param_groups)

    @torch.no_grad()
    def follow_weight(self, parameter: Tensor) -> None:
        """Let the states follow a parameter that was moved or loaded now, instead of at the next step; errors as there."""
        self._follow(parameter)

    def _follow(self, parameter: Tensor) -> None:
        """Let the states follow a parameter that was moved or loaded since the last step. ValueError if it was cast."""
        if parameter not in self._origins:
            raise ValueError(
                "a parameter group holds a parameter that the optimizer was not given: it was replaced after initialize, as "
                "Accelerate does for FSDP2. Use octet.parallelize in the place of FSDP, or add what is new by add_param_group."
            )
        weight, state = self._quantized.get(parameter), self.state.get(parameter)
        if weight is None and parameter.dtype not in TRAINABLE_DTYPES:
            raise ValueError(wrong_dtype(parameter))
        if weight is not None and weight.codes is not parameter:
            raise ValueError(
                "a layer holds another parameter than the optimizer: it was replaced after initialize, as load_state_dict("
                "assign=True) and to_empty do. Call initialize after what replaces parameters."
            )
        if not state:
            return
        if weight is not None:
            self._renew_master(weight, state)
        held = state[next(iter(self.rule.state_codecs))]["codes"]
        if self.host_states is None and held.device != parameter.device:
            for name, value in state.items():
                if isinstance(value, dict):
                    state[name] = copy_parts(value, parameter.device)
            state["step"] = self._new_step_count(parameter, int(state["step"]))

    def _renew_master(self, weight: QuantizedWeight, state: dict[str, Any] | None) -> None:
        """Make the master weight from what the layer has loaded since it was made, if it has loaded anything."""
        if state and weight.needs_master and is_stale(state["master_weights"], weight):
            state["master_weights"] = new_master(weight)

    def _update_all(self, updates: list[tuple[Tensor, Group]], finite: Tensor, alone: Tensor | None = None) -> None:
        """Step parameters if `finite`, bool (), is true. alone: the only one."""
        if self.host_states is not None:
            for parameter, group in updates:
                self.state[parameter] or self._allocate(parameter, group)
            for update in self.host_states.visit(updates, self.state):
                self._update_here([update], finite, update[0])
        else:
            self._update_here(updates, finite, alone)

    def _update_here(self, updates: list[tuple[Tensor, Group]], finite: Tensor, alone: Tensor | None) -> None:
        plain = self._step_fused(updates, finite, alone)
        if plain and finite:  # the one value that the host waits for
            for parameter, group in plain:
                self._update(parameter, group)

    def _step_fused(
        self, updates: list[tuple[Tensor, Group]], finite: Tensor, alone: Tensor | None
    ) -> list[tuple[Tensor, Group]]:
        """Step the parameters that the kernels take; returns the others."""
        if self._watch is not None and alone is None:
            self._fused_steps[None].run(self._watch.rows, self.param_groups, finite, self.seed)
            return []
        fused: list[tuple[Tensor, Group]] = []
        plain: list[tuple[Tensor, Group]] = []
        for update in updates:
            (fused if self.is_fused(update[0]) else plain).append(update)
        if not fused:
            return plain
        from worker.optim.fused import FusedStep, Rows, describe  # loads Triton
        from worker.optim.watch import Watch

        if alone not in self._fused_steps:
            self._fused_steps[alone] = FusedStep(self.rule)
        rows = Rows(describe(self, fused), self.rule)
        self._fused_steps[alone].run(rows, self.param_groups, finite, self.seed)
        if alone is None and not plain and self.host_states is None:
            self._watch = Watch(self, updates, rows)
        return plain

    def is_fused(self, parameter: Tensor) -> bool:
        """Whether kernels step the parameter, for which the host does not wait."""
        wanted = parameter.is_cuda if self.fused is None else self.fused
        starts_a_draw = self._origins[parameter].first_draw % NUMBERS_PER_DRAW == 0  # kernels use whole draws
        return wanted and parameter.is_contiguous() and starts_a_draw

    def _new_step_count(self, parameter: Tensor, num_steps: int) -> int | Tensor:
        """The number of steps; on the device where the kernels count them."""
        if not self.is_fused(parameter):
            return num_steps
        return torch.full((), num_steps, dtype=torch.int64, device=parameter.device)

    def _update(self, parameter: Tensor, group: Group) -> None:
        assert parameter.grad is not None
        state = self.state[parameter] or self._allocate(parameter, group)
        state["step"] += 1
        gradients, weight = GradientReader(parameter.grad), self._stored_weight(parameter, group)
        stored = {name: self._stored_state(parameter, group, name) for name in self.rule.state_codecs}
        for elements in runs(parameter.numel()):
            values, states = weight.read(elements), {name: state.read(elements) for name, state in stored.items()}
            self.rule.step_(values, gradients.read(elements), states, int(state["step"]), group)
            weight.write(elements, values)
            for name, state_values in states.items():
                stored[name].write(elements, state_values)
        weight.finish()

    def _allocate(self, parameter: Tensor, group: Group) -> dict[str, Any]:
        """Allocate a parameter's states, and the master weight that it needs."""
        state = self._zero_states(parameter, group)
        weight = self._quantized.get(parameter)
        if weight is not None and weight.needs_master:
            state["master_weights"] = new_master(weight)
        if self.host_states is not None:
            self.host_states.hold(state)
        self.state[parameter] = state
        return state

    def _zero_states(self, parameter: Tensor, group: Group) -> dict[str, Any]:
        """The states before the first step: the number of steps, and dicts of plain tensors."""
        state: dict[str, Any] = {"step": self._new_step_count(parameter, 0)}
        for name in self.rule.state_codecs:
            state[name] = zeros(self._codec(parameter, group, name), parameter.numel(), parameter.device)
        return state

    def _load(self, parameter: Tensor, group: Group, saved: dict[str, Any], saved_group: Group) -> None:
        """Take over a parameter's saved states."""
        check_states(saved, self.rule)
        state = self.state[parameter] = {"step": self._new_step_count(parameter, int(saved["step"]))}
        for name in self.rule.state_codecs:
            codec, saved_codec = self._codec(parameter, group, name), self._codec(parameter, saved_group, name)
            parts = saved[name] if isinstance(saved[name], dict) else {"codes": saved[name].float().reshape(-1)}
            check_parts(name, parts, saved_codec)
            state[name] = copy_parts(self._own_entries(parameter, parts), parameter.device)
            if codec is not saved_codec:
                values = saved_codec.decode(state[name])
                state[name] = zeros(codec, parameter.numel(), parameter.device)
                self._stored_state(parameter, group, name).write(range(parameter.numel()), values)
        weight = self._quantized.get(parameter)
        if weight is not None and weight.needs_master:
            if "master_weights" in saved:
                state["master_weights"] = copy_parts(self._own_entries(parameter, saved["master_weights"]), parameter.device)
            else:
                state["master_weights"] = new_master(weight)
        if self.host_states is not None:
            self.host_states.hold(state)

    def _own_entries(self, parameter: Tensor, parts: Parts) -> Parts:
        """The entries of saved parts for the elements of a parameter: all, unless it is a piece of what was saved."""
        _, first_element, num_elements, *_ = self._origins[parameter]
        return entries_of_piece(parts, range(first_element, first_element + parameter.numel()), num_elements)

    def _stored_weight(self, parameter: Tensor, group: Group) -> StoredWeight:
        draw = self._draw(parameter, self._first_stream(parameter))
        weight = self._quantized.get(parameter)
        if weight is None:
            return WideWeight(parameter) if parameter.dtype == torch.float32 else RoundedWeight(parameter, draw)
        bound = self.rule.bound_after_step(weight.amax, int(self.state[parameter]["step"]), group)
        if weight.needs_master:
            return MasteredWeight(weight, self.state[parameter]["master_weights"], bound, draw)
        if weight.residual is not None:
            return SplitWeight(weight, bound, draw)
        return ScaledWeight(weight, weight.codes, weight.dequant_scale, bound, draw)

    def _stored_state(self, parameter: Tensor, group: Group, name: str) -> StoredState:
        stream = self._first_stream(parameter) + 1 + list(self.rule.state_codecs).index(name)
        return StoredState(self._codec(parameter, group, name), self.state[parameter][name], self._draw(parameter, stream))

    def _codec_names(self, group: Group) -> tuple[str, ...]:
        """The codecs of the rule's states, in order, of large parameters; a group of torch's optimizers names none: fp32."""
        return tuple(str(group.get(f"{state}_codec", "fp32")) for state in self.rule.state_codecs)

    def _codec(self, parameter: Tensor, group: Group, state: str) -> Codec:
        return CODECS["fp32" if is_small(self._origins[parameter]) else str(group.get(f"{state}_codec", "fp32"))]

    def _first_stream(self, parameter: Tensor) -> int:
        """The random stream of the weight; each state of the rule has one of the next."""
        return self._origins[parameter].parameter_index * (1 + len(self.rule.state_codecs))

    def _draw(self, parameter: Tensor, stream: int) -> Draw:
        """A source of random numbers for this step of a parameter."""
        first, step = self._origins[parameter].first_draw, int(self.state[parameter]["step"])

        def draw(elements: range) -> Tensor:
            shifted = range(first + elements.start, first + elements.stop)
            return kernels.random_bits(self.seed, step, stream, shifted, parameter.device)

        return draw
