"""Adam and AdamW whose states, weights and gradients are held in few bits, and computed in fp32.

    gradient += weight_decay · weight                                  Adam (L2); AdamW: weight *= 1 - lr · weight_decay
    exp_avg    = beta1 · exp_avg + (1 - beta1) · gradient
    exp_avg_sq = beta2 · exp_avg_sq + (1 - beta2) · gradient²
    weight    -= lr / (1 - beta1^t) · exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)

as torch.optim has them. Only what is stored is rounded: this step's update uses the moments before rounding. Parameters are
walked over once, in runs of elements: none is wide as a whole, unless a codec has one scale for it. Rounding is stochastic
from a counter (seed, parameter, its step, element), so a resumed or sharded run draws the same bits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from worker import kernels
from worker.kernels.rounding import NUMBERS_PER_DRAW
from worker.optim.codecs import CODECS, Codec, Draw, Parts, StoredState, zeros
from worker.optim.gradients import GradientReader, all_finite
from worker.optim.update import adam_, bound_after_step
from worker.optim.weights import (
    RUN_LENGTH,
    MasteredWeight,
    QuantizedWeight,
    RoundedWeight,
    ScaledWeight,
    SplitWeight,
    StoredWeight,
    WideWeight,
    new_master,
    runs,
)

if TYPE_CHECKING:
    from worker.optim.fused import FusedStep

MIN_QUANTIZED_ELEMENTS = 4096
"""Smaller tensors (norms, biases) keep fp32 states: nothing to save, and they are the most sensitive."""

MASTER_CODEC = CODECS["fp16-tensor"]
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENT_CODECS = {
    "exp_avg": tuple(name for name in CODECS if name != "uint8-companded"),
    # A square spans twice the binades: E4M3 would flush some to zero, and the update divides by its root.
    "exp_avg_sq": ("fp32", "bf16-sr", "fp16-tensor", "fp16-block", "uint8-companded"),
}
PURPOSES = ("weight", *MOMENTS)  # of random numbers


@dataclass(frozen=True)
class Hyperparameters:
    """What a parameter group may set for itself; names and defaults are those of torch.optim.AdamW."""

    lr: float | Tensor = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled_weight_decay: bool = True
    maximize: bool = False
    exp_avg_codec: str = "fp8-dre"
    exp_avg_sq_codec: str = "fp16-block"


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW (or Adam: `decoupled_weight_decay=False`) with a codec for each moment, by parameter group.

    params: parameters or groups, as for any torch optimizer; plain fp32, bf16 and fp16 ones are trained as they are.
    quantized: those of which the values are codes × dequant_scale. E4M3 codes without a residual get an FP16 master weight.
    all_ranks_finite: given whether this rank's gradients are finite (a 0-dim bool), tells whether those of all ranks are.
    fused: one pass by Triton kernels and no wait of the host; by default on CUDA. Codecs with one scale for a whole tensor, and
    parameters that are not contiguous, are stepped by plain torch everywhere.

    A step with a non-finite gradient changes nothing and is counted in `num_skipped_steps`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: Hyperparameters = Hyperparameters(),
        *,
        quantized: Iterable[QuantizedWeight] = (),
        seed: int = 0,
        all_ranks_finite: Callable[[Tensor], Tensor] | None = None,
        fused: bool | None = None,
    ) -> None:
        self.seed = seed
        self.all_ranks_finite = all_ranks_finite
        self.fused = fused
        self._num_skipped = torch.zeros((), dtype=torch.int64)
        self._fused_step: FusedStep | None = None
        self._quantized: dict[Tensor, QuantizedWeight] = {weight.codes: weight for weight in quantized}
        self._origins: dict[Tensor, tuple[int, int]] = {}
        super().__init__(params, {field.name: getattr(defaults, field.name) for field in fields(defaults)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and allocate its states."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_group(group)
        for parameter in group["params"]:
            if parameter not in self._quantized and parameter.dtype not in PLAIN_DTYPES:
                raise ValueError(
                    f"a parameter has dtype {parameter.dtype}; allowed: {', '.join(map(str, PLAIN_DTYPES))}. "
                    "Name codes, and the scale that belongs to them, in `quantized`."
                )
            self._origins[parameter] = (len(self._origins), 0)
            if parameter.requires_grad:
                self._allocate(parameter, group)

    def set_origin(self, parameter: Tensor, parameter_index: int, first_element: int) -> None:
        """Say which elements of which parameter a shard holds, so that it draws the random bits of the whole."""
        self._origins[parameter] = (parameter_index, first_element)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, or none if any gradient on any rank is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        finite = all_finite(parameter.grad for parameter, _ in updates)
        if self.all_ranks_finite is not None:
            finite = self.all_ranks_finite(finite)
        self._num_skipped = self._num_skipped.to(finite.device).add_(~finite)
        plain = self._step_fused(updates, finite)
        if plain and finite:  # the one value that the host waits for
            for parameter, group in plain:
                self._update(parameter, group)
        return loss

    @property
    def num_skipped_steps(self) -> int:
        """Steps that changed nothing because a gradient was not finite. Waits for the device."""
        return int(self._num_skipped)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the seed and the number of skipped steps."""
        return super().state_dict() | {"seed": self.seed, "num_skipped_steps": self.num_skipped_steps}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict of this class, bit for bit, or of torch's Adam and AdamW.

        The codecs stay those of this optimizer: a moment that was stored in another way is encoded anew.
        """
        codecs = [{f"{moment}_codec": group[f"{moment}_codec"] for moment in MOMENTS} for group in self.param_groups]
        saved_groups = state_dict["param_groups"]
        super().load_state_dict({"state": {}, "param_groups": saved_groups})  # torch would cast codes to the weight's dtype
        self.seed = state_dict.get("seed", self.seed)
        self._num_skipped.fill_(state_dict.get("num_skipped_steps", 0))
        for group, saved_group, own_codecs in zip(self.param_groups, saved_groups, codecs, strict=True):
            group.update(own_codecs)
            for parameter, key in zip(group["params"], saved_group["params"], strict=True):
                if key in state_dict["state"]:
                    self._load(parameter, group, state_dict["state"][key], saved_group)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold; torch's own drops every attribute that it does not know."""
        own = ["seed", "all_ranks_finite", "fused", "_num_skipped", "_quantized", "_origins"]
        own += ["_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"]  # a converted model follows the steps by these
        return super().__getstate__() | {name: getattr(self, name) for name in own} | {"_fused_step": None}

    def _step_fused(self, updates: list[tuple[Tensor, dict[str, Any]]], finite: Tensor) -> list[tuple[Tensor, dict[str, Any]]]:
        """Step those parameters that the kernels take; returns the others."""
        fused = [(parameter, group) for parameter, group in updates if self._is_fused(parameter, group)]
        if not fused:
            return updates
        from worker.optim.fused import FusedStep, Update  # loads Triton

        self._fused_step = self._fused_step or FusedStep()
        group_indices = {id(group): index for index, group in enumerate(self.param_groups)}
        self._fused_step.run(
            [
                Update(
                    parameter,
                    self.state[parameter] or self._allocate(parameter, group),
                    self._quantized.get(parameter),
                    tuple(_codec_name(parameter, group, moment) for moment in MOMENTS),
                    group_indices[id(group)],
                    self._origins[parameter][0] * len(PURPOSES),
                    self._origins[parameter][1],
                )
                for parameter, group in fused
            ],
            self.param_groups,
            finite,
            self.seed,
        )
        return [update for update in updates if not self._is_fused(*update)]

    def _is_fused(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        wanted = parameter.is_cuda if self.fused is None else self.fused
        per_tensor = any(_codec(parameter, group, moment).per_tensor for moment in MOMENTS)
        starts_a_draw = self._origins[parameter][1] % NUMBERS_PER_DRAW == 0  # kernels use whole draws
        return wanted and not per_tensor and parameter.is_contiguous() and starts_a_draw

    def _new_step_count(self, parameter: Tensor, group: dict[str, Any], num_steps: int) -> int | Tensor:
        """Where the kernels step, the count is on the device."""
        if not self._is_fused(parameter, group):
            return num_steps
        return torch.full((), num_steps, dtype=torch.int64, device=parameter.device)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter] or self._allocate(parameter, group)
        state["step"] += 1
        gradients, weight = GradientReader(parameter.grad), self._stored_weight(parameter, group)
        exp_avg, exp_avg_sq = (self._stored_state(parameter, group, moment) for moment in MOMENTS)
        at_once = exp_avg.codec.per_tensor or exp_avg_sq.codec.per_tensor
        for elements in runs(parameter.numel(), parameter.numel() if at_once else RUN_LENGTH):
            values, average, square = weight.read(elements), exp_avg.read(elements), exp_avg_sq.read(elements)
            adam_(values, gradients.read(elements), average, square, int(state["step"]), group)
            weight.write(elements, values)
            exp_avg.write(elements, average)
            exp_avg_sq.write(elements, square)
        weight.finish()

    def _allocate(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Fresh states: the number of steps, and plain tensors in dicts."""
        state: dict[str, Any] = {"step": self._new_step_count(parameter, group, 0)}
        for moment in MOMENTS:
            state[moment] = zeros(_codec(parameter, group, moment), parameter.numel(), parameter.device)
        weight = self._quantized.get(parameter)
        if weight is not None and weight.needs_master:
            state["master_weights"] = new_master(weight, MASTER_CODEC)
        self.state[parameter] = state
        return state

    def _load(self, parameter: Tensor, group: dict[str, Any], saved: dict[str, Any], saved_group: dict[str, Any]) -> None:
        state = self.state[parameter] = {"step": self._new_step_count(parameter, group, int(saved["step"]))}
        for moment in MOMENTS:
            codec, saved_codec = _codec(parameter, group, moment), _codec(parameter, saved_group, moment)
            parts = saved[moment] if isinstance(saved[moment], dict) else {"codes": saved[moment].float().reshape(-1)}
            _check_parts(moment, parts, saved_codec)
            state[moment] = {name: part.to(parameter.device, copy=True) for name, part in parts.items()}
            if codec is not saved_codec:
                values = saved_codec.decode(state[moment])
                state[moment] = zeros(codec, parameter.numel(), parameter.device)
                self._stored_state(parameter, group, moment).write(range(parameter.numel()), values)
        weight = self._quantized.get(parameter)
        if weight is None or not weight.needs_master:
            return
        if "master_weights" in saved:
            master = {name: part.to(parameter.device, copy=True) for name, part in saved["master_weights"].items()}
        else:
            master = new_master(weight, MASTER_CODEC)
        state["master_weights"] = master

    def _stored_weight(self, parameter: Tensor, group: dict[str, Any]) -> StoredWeight:
        draw = self._draw(parameter, "weight")
        weight = self._quantized.get(parameter)
        if weight is None:
            return WideWeight(parameter) if parameter.dtype == torch.float32 else RoundedWeight(parameter, draw)
        assert weight.amax is not None
        bound = bound_after_step(weight.amax, int(self.state[parameter]["step"]), group)
        if weight.needs_master:
            return MasteredWeight(weight, self.state[parameter]["master_weights"], bound, draw)
        if weight.residual is not None:
            return SplitWeight(weight, bound, draw)
        return ScaledWeight(weight, weight.codes, weight.dequant_scale, bound, draw)

    def _stored_state(self, parameter: Tensor, group: dict[str, Any], moment: str) -> StoredState:
        return StoredState(_codec(parameter, group, moment), self.state[parameter][moment], self._draw(parameter, moment))

    def _draw(self, parameter: Tensor, purpose: str) -> Draw:
        """A source of random numbers for this step of a parameter, a stream of its own for each purpose."""
        parameter_index, first_element = self._origins[parameter]
        stream = parameter_index * len(PURPOSES) + PURPOSES.index(purpose)
        step = int(self.state[parameter]["step"])

        def draw(elements: range) -> Tensor:
            shifted = range(first_element + elements.start, first_element + elements.stop)
            return kernels.random_bits(self.seed, step, stream, shifted, parameter.device)

        return draw


def check_group(group: dict[str, Any]) -> None:
    """Refuse what no step could use: ValueError with the option, what was got and what is allowed."""
    for name, is_allowed, allowed in (
        ("lr", lambda lr: lr >= 0, "at least 0"),
        ("betas", lambda betas: all(0 <= beta < 1 for beta in betas), "two numbers from 0 up to, not including, 1"),
        ("eps", lambda eps: eps >= 0, "at least 0"),
        ("weight_decay", lambda weight_decay: weight_decay >= 0, "at least 0"),
    ):
        if not is_allowed(group[name]):
            raise ValueError(f"{name} is {group[name]}; allowed: {allowed}. Change it in the parameter group.")
    for moment in MOMENTS:
        codec, codecs = group[f"{moment}_codec"], MOMENT_CODECS[moment]
        if codec not in codecs:
            raise ValueError(f"{moment}_codec is {codec!r}; allowed: {', '.join(codecs)}. Change it in the parameter group.")


def _check_parts(moment: str, parts: Parts, codec: Codec) -> None:
    """Refuse a saved moment that its codec does not store so: a kernel would be given addresses that are none."""
    if set(parts) != set(codec.parts):
        raise ValueError(
            f"the saved {moment} consists of {', '.join(parts)}; allowed: {', '.join(codec.parts)}. Another version of Octet "
            "saved it: finish the run with that one, or start the optimizer anew from the saved weights."
        )


def _codec_name(parameter: Tensor, group: dict[str, Any], moment: str) -> str:
    """The codec of a parameter's moment; a group of torch's own optimizers names none and has fp32."""
    return "fp32" if parameter.numel() < MIN_QUANTIZED_ELEMENTS else group.get(f"{moment}_codec", "fp32")


def _codec(parameter: Tensor, group: dict[str, Any], moment: str) -> Codec:
    return CODECS[_codec_name(parameter, group, moment)]
