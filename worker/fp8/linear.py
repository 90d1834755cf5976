"""The FP8 linear layer and its three matrix products.

    output_TN      = input_TK @ weight_NK.T             e4m3 x e4m3
    grad_input_TK  = grad_output_TN @ weight_NK         e5m2 x e4m3, or e4m3 x e4m3
    grad_weight_NK = grad_output_TN.T @ input_TK        e5m2 x e4m3, or e4m3 x e4m3

The forward pass is one op, `kernels.linear_output`, and the backward pass another, `kernels.linear_gradients`; how they
quantize stands in the layer's plan (`plan.py`), which is settled before. Each product may be left in bf16 by the recipe;
such a product is torch's own. What waits for the backward pass is the input's FP8 codes and scale, not the input itself
(unless grad_weight is left in bf16). A layer that computes the activation before it (`sequence.py`) keeps neither: the
activation's input is kept for its own derivative anyway, and all else is made of it once more. A weight that is not held in
FP8 is quantized, or decoded to bf16, again in the backward pass: cheaper than a second copy of every weight in between.

Shape suffixes: T tokens (all leading dimensions), K in features, N out features.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from octet.api_schemas.recipe import GemmName
from octet.worker import kernels
from octet.worker.fp8.bf16 import activation_dtype, half_linear, half_matmul, half_to_save
from octet.worker.fp8.casts import Change, check_cast, moved
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.fsdp import hold_codes_in_shard, holds_codes, is_shard
from octet.worker.fp8.gradient_hooks import keep_gradient_in_fp8, once_differentiable, open_port, product_dtype, zero_gradients
from octet.worker.fp8.handoff import (
    GraphHandoff,
    Handoff,
    attach_gradient,
    gradient_handoff_of,
    handoff_of,
    write_gradients,
)
from octet.worker.fp8.layout import layout_of
from octet.worker.fp8.operand import OperandScaling
from octet.worker.fp8.plan import PLANNED_BY, HeldAs, LinearPlan, plan_of
from octet.worker.fp8.recipe import E4M3, Recipe
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.fp8.stored import is_exact, read_weight, save_layer
from octet.worker.fp8.weight import Float8Weight, hold_encoded, is_float8_weight
from octet.worker.fp8.weights import EncodedWeight
from octet.worker.kernels import LinearFormats, Operand, ScaledCodes, ScaleKind
from octet.worker.kernels.torch_private import in_shape


class Float8Linear(nn.Module):
    """Takes over the parameters of an `nn.Linear` or a `Conv1D` and multiplies in FP8.

    `weight` is a `Float8Weight`, or a plain tensor of values. It is (N, K), or, where `is_transposed`, (K, N).
    whole_residual: where ranks divide the residual, a context that puts it together: all ranks enter it together.
    values_plan: the plan for a weight of plain values in the place of codes, as `functional_call` and `weight_norm` give it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    num_steps: int
    plan: LinearPlan
    values_plan: LinearPlan
    whole_residual: Callable[[], AbstractContextManager[None]] | None = None
    returns_16_bits: ClassVar[bool] = True
    keeps_products = False
    """True if selective checkpointing keeps only the results of products."""
    num_roundings = 0
    """Gradient roundings before this run: an elastic job may accumulate in fp32 now, and in FP8 again later."""
    gathers_codes = False
    """True if FSDP2 gathers the weight as codes (`gathered.py`)."""
    may_recover = False
    """True if samples are taken of a demoted layer too, which may bring it back to FP8."""
    is_probed = False
    """True if the next pass, in bf16, measures the operands as FP8 would hold them. Set with the plan."""

    def __init__(
        self,
        linear: nn.Module,
        recipe: Recipe,
        encoded_weight: EncodedWeight | None = None,
        gradient_position: RoundingPosition | None = None,
        statistics_every: int = 0,
    ) -> None:
        """encoded_weight: takes the place of the weight's values. gradient_position: gradients are held in FP8.

        statistics_every: optimizer steps between two samples of how well FP8 holds the operands; 0 for none.
        """
        nn.Module.__init__(self)
        layout = layout_of(linear)
        assert layout is not None
        self.in_features, self.out_features, self.is_transposed = layout
        self.weight, self.bias = linear.get_parameter("weight"), linear.bias  # type: ignore[assignment]
        self.recipe, device = recipe, self.weight.device
        self.input_scaling = OperandScaling(recipe, recipe.input, device)
        self.weight_scaling = OperandScaling(recipe, recipe.weight, device)
        self.grad_output_scaling = OperandScaling(recipe, recipe.grad_output, device)
        self.gradient_position, self.statistics_every = gradient_position, statistics_every
        self.activation: str | None = None  # what comes right before it in its sequence; one of kernels' ACTIVATIONS
        self.num_breaches = 0  # samples in a row that broke a limit; below 0: that many in a row kept all, once demoted
        self.fallback = Fallback.NONE
        if encoded_weight is not None:
            hold_encoded(self.weight, encoded_weight)
        self.prepare_gradient()
        self.train(linear.training)
        self.start_step(0)
        self._settle()

    def forward(self, input: Tensor, *, takes_over_activation: bool = False) -> Tensor:
        """takes_over_activation: the input is that of `self.activation`, which is applied first."""
        plan: LinearPlan = self.plan
        # Not `self.weight`: a parametrization computes it at each read, and spectral_norm's iterates then.
        if plan.holds_codes and not is_float8_weight(self._parameters.get("weight")):
            plan = self.values_plan
        if self.is_probed:
            return self._probed(input, plan, takes_over_activation=takes_over_activation)
        return self._output(input, plan, takes_over_activation=takes_over_activation)

    def _output(self, input: Tensor, plan: LinearPlan, *, takes_over_activation: bool) -> Tensor:
        if not plan.high_precision:
            return self._multiplied(input, plan, takes_over_activation=takes_over_activation)
        output_dtype = activation_dtype(input)
        with torch.autocast(input.device.type, enabled=False):  # it casts products in bf16 alone
            if not plan.is_half:
                return self._multiplied(input, plan, output_dtype, takes_over_activation=takes_over_activation)
            if takes_over_activation and self.activation is not None:
                input = kernels.ACTIVATIONS[self.activation].forward(input)
            weight_NK = self.weight.t() if self.is_transposed else self.weight
            return half_linear(input, weight_NK, self.bias, torch.bfloat16).to(output_dtype)

    def _probed(self, input: Tensor, plan: LinearPlan, *, takes_over_activation: bool) -> Tensor:
        """The output in bf16, while the three operands are measured as FP8 would hold them."""
        output = self._output(input, plan, takes_over_activation=takes_over_activation)
        if not input.numel():
            return output
        with torch.no_grad():
            input_TK = input.detach().reshape(-1, self.in_features)
            if takes_over_activation and self.activation is not None:
                input_TK = kernels.ACTIVATIONS[self.activation].forward(input_TK)
            self.input_scaling.probe(input_TK)
            if not plan.multiplies_codes:
                is_decoded = plan.held_as is HeldAs.DECODED
                held = Operand(self.weight_values()) if is_decoded else self.held_weight(self.weight, plan)
                self.weight_scaling.probe(held.data.detach(), held.dequant_scale)
        return ProbedGradient.apply(output, self.grad_output_scaling)

    def _multiplied(
        self, input: Tensor, plan: LinearPlan, output_dtype: torch.dtype | None = None, *, takes_over_activation: bool
    ) -> Tensor:
        """The output of a pass in which some product is in FP8, or the weight is held in codes."""
        weight: Any = self._parameters.get("weight")
        if type(weight) is not Float8Weight:
            weight = self.weight
            if plan is self.values_plan and type(weight) is Float8Weight:  # a parametrization that returns what it is given
                plan = self.plan
        formats = plan.after_activation if takes_over_activation else plan.formats
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and type(weight) is Float8Weight and weight.state.entries:
            weight.state.take_back()
        if is_compiling and plan is self.plan and weight.requires_grad and self._gradient_port is not None:
            weight = self._gradient_port
        grad_output = grad_before = None
        keeps = torch.is_grad_enabled()
        if formats.activation is None:
            known = handoff_of(input)
        else:
            known = GraphHandoff(is_shared=False) if is_compiling else None
            grad_before = gradient_handoff_of(input) if keeps else None
        if keeps and not is_compiling and formats.grad_output.kind is ScaleKind.TENSOR:
            goes_on = input.requires_grad
            if goes_on or weight.requires_grad:
                wants_rows = goes_on and "grad_input" not in plan.high_precision
                consumer: Any = self._modules["grad_output_scaling"] if wants_rows else None
                grad_output = Handoff(consumer, is_shared=False)
        dtype = activation_dtype(input) if output_dtype is None else output_dtype
        settings = ForwardPass(plan, formats, dtype, keeps, known, grad_output, grad_before)
        bias: Any = self._parameters.get("bias")
        if bias is None:
            bias = self.bias  # perhaps a parametrization's
        if plan.adds_bias_after:
            output_TN: Tensor = Float8Products.apply(input.reshape(-1, self.in_features), weight, None, self, settings)
            output_TN = output_TN if bias is None else output_TN + bias.to(dtype)
            output = output_TN if input.dim() == 2 else in_shape(output_TN, (*input.shape[:-1], self.out_features))
        else:
            output = Float8Products.apply(input, weight, bias, self, settings)
        if keeps and not plan.owns_output and not is_compiling and (bias is None or not plan.adds_bias_after):
            output = output.clone()  # a model may change it in place, and not what is kept
        return output if grad_output is None else attach_gradient(output, grad_output)

    @property
    def high_precision(self) -> frozenset[GemmName]:
        """The products that are computed in bf16 in the present mode."""
        return self.plan.high_precision

    def weight_values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight's values in the parameter's shape, as a product reads them, or rounded once to dtype."""
        weight: Any = self.weight
        if type(weight) is not Float8Weight:
            return self.weight.detach().to(dtype)
        if weight.residual is None:
            return kernels.values_of(ScaledCodes(weight.codes, weight.dequant_scale, ScaleKind.TENSOR), dtype)
        return kernels.split_dequantize(weight.codes, weight.residual, weight.dequant_scale, dtype)

    def weight_operand(self, held: Operand, plan: LinearPlan) -> Operand:
        """Return the weight as `linear_output` takes it. held: see `held_weight`."""
        if plan.takes_weight_as_held:
            return held
        if plan.held_as is HeldAs.DECODED:
            held = Operand(self.weight_values())
        if plan.multiplies_codes:
            if plan.held_as is HeldAs.GATHERED and held.amax is not None:
                self.weight_scaling.remember_amax(held.amax)
            return Operand(held.data.t() if self.is_transposed else held.data, held.dequant_scale)
        scaling: Any = self._modules["weight_scaling"]
        operand: Operand = scaling.weight_operand(held, "columns" if self.is_transposed else "rows")
        return operand

    def weight_operand_again(self, saved: Operand, amax: Tensor | None, plan: LinearPlan) -> Operand:
        """Return the weight as `linear_gradients` takes it.

        saved: what waited for the backward pass. amax: the one that `weight_operand` returned.
        """
        if plan.takes_weight_as_held:
            return saved
        if plan.held_as is HeldAs.GATHERED:
            saved = self.held_weight(self.weight, plan)
        if plan.multiplies_codes:
            return Operand(saved.data if self.is_transposed else saved.data.t(), saved.dequant_scale)
        held = Operand(self.weight_values()) if plan.held_as is HeldAs.DECODED else saved
        scaling: Any = self._modules["weight_scaling"]
        side = "rows" if self.is_transposed else "columns"
        operand: Operand
        if "output" in plan.high_precision:  # then the forward pass has not quantized it
            operand = scaling.weight_operand(held, side)
        else:
            operand = scaling.weight_operand_again(held, side, amax)
        return operand

    def held_weight(self, weight: Tensor, plan: LinearPlan) -> Operand:
        """Return the weight in the form that it has: values, or codes with their scale and amax.

        weight: the parameter; in a graph perhaps its gradient's port.
        """
        if plan.held_as is HeldAs.VALUES:
            # Not detached: autograd does not look into the function, and each call of torch costs the host.
            return Operand(weight)
        held: Any = weight if type(weight) is Float8Weight else self.weight
        if plan.held_as is HeldAs.GATHERED:  # a GatheredWeight of `gathered.py`
            return Operand(held.codes, held.dequant_scale, held.whole_amax)
        return Operand(held.codes, held.dequant_scale, held.values_amax)

    def half_weight(self, *, transposed: bool = False) -> Tensor:
        """The weight in bf16, (N, K), or transposed, (K, N)."""
        values = self.weight_values(torch.bfloat16)
        return values if transposed == self.is_transposed else values.t()

    @property
    def encoded(self) -> Float8Weight | None:
        """The weight, if it is held as codes."""
        return self.weight if is_float8_weight(self.weight) else None

    @property
    def reads_residual(self) -> bool:
        """True if a product may read the weight more precisely than its FP8 codes are."""
        recipe = self.recipe
        uses_fp8 = self.fallback is Fallback.NONE and recipe.fp8_in_evaluation
        return not uses_fp8 or recipe.weight.kind.is_blockwise or bool(recipe.high_precision & {"output", "grad_input"})

    def hold_values(self) -> None:
        """Hold the weight as a plain parameter of fp32 values from now on, whose gradient is plain, too."""
        if self.encoded is None:
            return
        self.weight = nn.Parameter(self.encoded.dequantize(), requires_grad=self.weight.requires_grad)
        self.gradient_position = None
        self._open_port()

    def extra_repr(self) -> str:
        shape = f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"
        products = str(self.recipe) if self.fallback is Fallback.NONE else f"{self.fallback.name.lower()}, all in bf16"
        activation = "" if self.activation is None else f"after {self.activation}, "
        held = self.weight.dtype if self.encoded is None else self.encoded.codes.dtype
        return f"{activation}{shape}, weight={held}, {products}"

    def start_step(self, num_steps: int) -> None:
        """Prepare for the forward passes between two optimizer steps, after that many of them."""
        vars(self)["num_steps"] = num_steps  # a module takes ten times as long to set, or find, an attribute
        is_sampled = self.statistics_every > 0 and num_steps % self.statistics_every == 0
        if is_sampled is not self.is_sampled:
            self.sample_step(is_sampled=is_sampled)

    def sample_step(self, *, is_sampled: bool = True) -> None:
        """Let the forward passes until the next step take samples, or none."""
        for scaling in self.scalings().values():
            vars(scaling)["is_sampled"] = is_sampled
        self._settle()

    @property
    def is_sampled(self) -> bool:
        """True if passes of a layer in training take samples until the next step."""
        scaling: Any = self._modules["input_scaling"]
        is_sampled: bool = scaling.is_sampled
        return is_sampled

    def _settle(self) -> None:
        """Take the plan for the layer as it is now."""
        uses_fp8 = self.fallback is Fallback.NONE and (self.training or self.recipe.fp8_in_evaluation)
        for name, held_as in (("plan", self._held_as()), ("values_plan", HeldAs.VALUES)):
            vars(self)[name] = plan_of(
                self.recipe,
                held_as,
                self.activation,
                uses_fp8=uses_fp8,
                is_transposed=self.is_transposed,
                is_sampled=self.is_sampled and self.training,
                keeps_products=self.keeps_products,
            )
        is_demoted = self.fallback is Fallback.DEMOTED
        vars(self)["is_probed"] = self.may_recover and is_demoted and self.is_sampled and self.training

    def _held_as(self) -> HeldAs:
        if self.gathers_codes:
            return HeldAs.GATHERED
        if self.encoded is None:
            return HeldAs.VALUES
        if self.encoded.codes.dtype != E4M3:
            return HeldAs.SCALED
        return HeldAs.DECODED if self.recipe.weight.kind.is_blockwise else HeldAs.CODES

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and take another plan where the plan depends on it."""
        if name == "weight":
            self._note_replaced(value)
        super().__setattr__(name, value)
        if name in PLANNED_BY and "plan" in vars(self):
            self._settle()

    def _note_replaced(self, new: Any) -> None:
        """Let the optimizer of a weight find out that the layer holds another one."""
        old: Any = self._parameters.get("weight")
        if type(old) is Float8Weight and is_shard(new) and not holds_codes(new):  # in FSDP2
            hold_codes_in_shard(old, new)
            vars(self).update(gradient_position=None, _gradient_port=None)  # a gradient is summed over ranks in fp32
        for weight, is_replaced in ((new, False), (old, old is not new)):  # in this order: an alias shares its state
            if type(weight) is Float8Weight:
                weight.state.is_replaced = is_replaced

    def get_extra_state(self) -> Tensor:
        """The rest of `state_dict`: counts of steps, of gradient roundings and of breaches; the fallback. int64, (4,)."""
        state = torch.tensor([self.num_steps, self.num_roundings, self.num_breaches, self.fallback])
        return self.gradient_position.with_count(state, 1) if self.gradient_position else state

    def set_extra_state(self, state: Tensor) -> None:
        num_steps, self.num_roundings, self.num_breaches, fallback = state.tolist()
        self.start_step(num_steps)
        self.fallback = Fallback(fallback)
        if self.gradient_position:
            self.gradient_position.count = self.num_roundings

    def scalings(self) -> dict[str, OperandScaling]:
        """The scaling of each operand, by the operand's name."""
        return {name: self._modules[f"{name}_scaling"] for name in ("input", "weight", "grad_output")}  # type: ignore[misc]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with nullcontext() if self.whole_residual is None or not is_exact() else self.whole_residual():
            save_layer(self, super()._save_to_state_dict, destination, prefix, keep_vars=keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        """Read what a layer of any level, or a plain one, has saved."""
        with nullcontext() if self.whole_residual is None else self.whole_residual():
            came_as_values = read_weight(self, state_dict, prefix, metadata, rest[-1])
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)
        if came_as_values:
            missing[:] = [name for name in missing if name != prefix + "_extra_state"]

    def prepare_gradient(self) -> None:
        self._open_port()
        if self.gradient_position is not None and self.weight.requires_grad:
            keep_gradient_in_fp8(self.weight, self.gradient_position)

    def _open_port(self) -> None:
        self._gradient_port = None if self.encoded is None else open_port(self.weight, self.gradient_position)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what a copied or unpickled parameter loses: the dtype of its gradient and the hook."""
        super().__setstate__(state)
        self.prepare_gradient()
        self._settle()

    def _apply(self, fn: Change, recurse: bool = True) -> "Float8Linear":
        """Move to another device, or cast what is plain: codes would be rounded once more by a cast of their values."""
        check_cast(self, fn)
        weight = self.encoded
        if weight is None:
            super()._apply(fn, recurse)
            return self
        parameters = self._parameters
        self._parameters = {name: parameter for name, parameter in parameters.items() if name != "weight"}
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters = {**parameters, **self._parameters}
        if weight.move(partial(moved, fn=fn)):
            self._open_port()
        return self


class Float8NNLinear(Float8Linear, nn.Linear):  # type: ignore[misc]
    """Takes the place of an `nn.Linear`, and is one for code that looks for them, as PEFT does.

    The layer in the place of a `Conv1D` is none: its weight is (K, N), and PEFT would merge (N, K) into it.
    """

    def _get_name(self) -> str:
        return Float8Linear.__name__


class ForwardPass(NamedTuple):
    """The settings and handoffs of one forward pass of a layer.

    formats: with the activation, if the layer computes it. keeps: autograd is on. input: the
    handoff of the input. grad_output: the handoff of the output's gradient. grad_before: the
    handoff of the gradient of the activation's input, which the backward pass of the activation
    fills in.
    """

    plan: LinearPlan
    formats: LinearFormats
    output_dtype: torch.dtype
    keeps: bool
    input: Handoff | None
    grad_output: Handoff | None
    grad_before: Handoff | None


Saved = tuple[Tensor | None, Tensor | None]
"""The input as saved for backward: codes (K, T) and scale; the activation's input and its result's amax; or bf16 values."""


class Float8Products(torch.autograd.Function):
    """The three products, and the bias. Every operand has the summed dimension last."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias_N: Tensor | None, layer: Float8Linear, settings: ForwardPass
    ) -> Tensor:
        """input: (..., K), and the result (..., N). weight: the parameter, or the port of its gradient."""
        plan, shape, weight_amax = settings.plan, input.shape, None
        input_TK = input if len(shape) == 2 else input.reshape(-1, layer.in_features)
        ctx.layer, ctx.plan, ctx.formats, ctx.input_dtype = layer, plan, settings.formats, input.dtype
        ctx.grad_output, ctx.grad_before = settings.grad_output, settings.grad_before
        ctx.grad_weight_dtype = product_dtype(weight, layer.gradient_position)
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        ctx.is_empty = input_TK.shape[0] == 0
        if ctx.is_empty:  # nothing to multiply, and nothing that a scale or a window should learn from
            ctx.shapes = shape, weight.shape
            return input.new_empty((*shape[:-1], layer.out_features), dtype=settings.output_dtype)
        needs_columns = settings.keeps and ctx.needs_input_grad[1] and "grad_weight" not in plan.high_precision
        held = layer.held_weight(weight, plan)
        input_half = None
        if settings.formats.activation is None and not plan.high_precision.isdisjoint(("output", "grad_weight")):
            input_half = half_to_save(input)
        if "output" in plan.high_precision:
            output_TN, saved = _half_output(layer, input_TK, input_half, bias_N, settings, columns=needs_columns)
        else:
            operand = layer.weight_operand(held, plan)
            output_TN, saved = _output(layer, input_TK, operand, settings, columns=needs_columns)
            weight_amax = operand.amax
            if bias_N is not None:
                bias_N = bias_N.to(settings.output_dtype)
                # In place only in eager code: torch 2.11's graphs return zero gradients for an
                # output that is changed in place.
                output_TN = output_TN + bias_N if torch.compiler.is_compiling() else output_TN.add_(bias_N)
        # Not reshaped: other functions keep the same tensor, and Dynamo hands no view to the backward pass.
        if settings.formats.activation is not None:
            saved = input, saved[1]
        elif "grad_weight" in plan.high_precision:
            saved = input_half, None
        # Autograd checks in the backward pass that the weight is unchanged.
        kept_weight = (weight, None, None) if plan.held_as is HeldAs.GATHERED else held
        ctx.save_for_backward(*saved, *kept_weight, weight_amax)
        # No view: autograd would refuse to add in place to a view that a function returns, which Falcon does.
        if len(shape) == 2:
            return output_TN
        return in_shape(output_TN, (*shape[:-1], layer.out_features), is_own=plan.owns_output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        layer, plan, formats, shape = ctx.layer, ctx.plan, ctx.formats, grad_output.shape
        grad_output_TN = grad_output if len(shape) == 2 else grad_output.reshape(-1, layer.out_features)
        if ctx.is_empty:
            return zero_gradients(ctx, grad_output_TN)
        # Reading them checks that the weight is unchanged.
        input_saved, input_number, *held, weight_amax = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        before_activation = input_saved
        if formats.activation is not None or "grad_weight" in plan.high_precision:
            input_saved = input_saved.reshape(-1, layer.in_features)
        grad_input = grad_weight = grad_bias_N = None
        rows, columns = (
            needs_input and "grad_input" not in plan.high_precision,
            needs_weight and "grad_weight" not in plan.high_precision,
        )
        if rows or columns:
            grads = _grad_operands(layer, plan, grad_output_TN, ctx.grad_output, rows=rows, columns=columns)
            input = _input_again(layer, plan, formats, (input_saved, input_number), grad_output_TN) if columns else None
            operand = layer.weight_operand_again(Operand(*held), weight_amax, plan) if rows else None
            sides = "both" if rows and columns else "rows" if rows else "columns"
            dtypes = (ctx.input_dtype, ctx.grad_weight_dtype)
            gradients = kernels.linear_gradients(*grads, input, operand, formats, sides, dtypes)
            grad_input, grad_weight = gradients[0] if rows else None, gradients[-1] if columns else None
        if needs_input and not rows:
            grad_input = half_matmul(grad_output_TN, layer.half_weight(transposed=True), ctx.input_dtype)
        if needs_weight and not columns:
            input_half = input_saved
            if formats.activation is not None:
                input_half = kernels.activate_again(input_saved, formats.activation, grad_output_TN)
            left, right = grad_output_TN.t(), input_half.t()
            left, right = (right, left) if layer.is_transposed else (left, right)
            grad_weight = half_matmul(left, right, ctx.grad_weight_dtype)
        if grad_input is not None and len(shape) != 2:
            grad_input = grad_input.view(*shape[:-1], layer.in_features)
        if grad_input is not None and formats.activation is not None:
            grad_input = _before_activation(formats.activation, grad_input, before_activation, ctx.grad_before)
        if needs_bias and "output" in plan.high_precision:
            grad_bias_N = grad_output_TN.sum(0, dtype=torch.float32)
        elif needs_bias:
            grad_bias_N = grad_output_TN.sum(0).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias_N, None, None


class ProbedGradient(torch.autograd.Function):
    """The identity; its backward pass measures the gradient as FP8 would hold it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, scaling: OperandScaling) -> Tensor:
        ctx.scaling = scaling
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        ctx.scaling.probe(grad_output.reshape(-1, grad_output.shape[-1]))
        return grad_output, None


def _output(
    layer: Float8Linear, input_TK: Tensor, weight: Operand, settings: ForwardPass, *, columns: bool
) -> tuple[Tensor, Saved]:
    """Return the output, computed in FP8, and the input to save for backward. columns: save its codes (K, T)."""
    plan, formats, handoff, dtype = settings.plan, settings.formats, settings.input, settings.output_dtype
    scaling: Any = layer._modules["input_scaling"]
    if formats.activation is not None:
        if plan.quantizes_input_first:
            rows, amax = scaling.activate(input_TK, formats.activation)
            [output_TN] = kernels.linear_output(Operand(rows.codes, rows.dequant_scale), weight, formats, dtype)
            return output_TN, (None, amax)
        amax = None
        if handoff is not None and not plan.high_precision:
            amax = handoff.recorded(input_TK, scaling, formats.activation, is_whole=False).amax
        output_TN, *kept = kernels.linear_output(Operand(input_TK, None, amax), weight, formats, dtype)
        return output_TN, (None, kept[0] if kept else None)
    is_first = plan.quantizes_input_first
    codes, amax = scaling.codes_before_product(input_TK, handoff, rows=True, columns=columns, is_first=is_first)
    if codes is None:
        shares = handoff is not None and handoff.is_shared and scaling.regather is None
        keeps = ("both" if shares else "columns") if columns else ("rows" if shares else "nothing")
        output_TN, *kept = kernels.linear_output(Operand(input_TK, None, amax), weight, formats, dtype, keeps=keeps)
        kind = formats.input.kind
        of_columns = kept[-2:] if columns else None
        if handoff is not None and shares:
            of_both = ScaledCodes(kept[0], kept[1], kind), ScaledCodes(kept[-2], kept[-1], kind) if columns else None
            handoff.share(scaling, of_both)
    else:
        of_rows, of_columns = codes
        assert of_rows is not None
        [output_TN] = kernels.linear_output(Operand(of_rows.codes, of_rows.dequant_scale), weight, formats, dtype)
    return output_TN, (None, None) if of_columns is None else (of_columns[0], of_columns[1])


def _half_output(
    layer: Float8Linear,
    input_TK: Tensor,
    input_half: Tensor | None,
    bias_N: Tensor | None,
    settings: ForwardPass,
    *,
    columns: bool,
) -> tuple[Tensor, Saved]:
    """Return the output, computed in bf16, and the input to save for backward. columns: save its codes (K, T).

    input_half: the input in bf16, (..., K); None where the layer computes the activation before it.
    """
    saved: Saved = (None, None)
    if input_half is None:
        assert settings.formats.activation is not None
        half_TK = kernels.ACTIVATIONS[settings.formats.activation].forward(input_TK).to(torch.bfloat16)
    else:
        half_TK = input_half.reshape(input_TK.shape)
        if "grad_weight" not in settings.plan.high_precision:
            sides = {"rows": False, "columns": columns}
            codes, _ = layer.input_scaling.codes_before_product(input_TK, settings.input, **sides, is_first=True)
            assert codes is not None
            saved = (None, None) if codes[1] is None else (codes[1].codes, codes[1].dequant_scale)
    output_TN = half_linear(half_TK, layer.half_weight(), bias_N, torch.bfloat16)
    return output_TN.to(settings.output_dtype), saved


def _grad_operands(
    layer: Float8Linear, plan: LinearPlan, grad_output_TN: Tensor, handoff: Handoff | None, *, rows: bool, columns: bool
) -> tuple[Operand, Operand | None]:
    """Return the gradient as `linear_gradients` takes it, and its columns if rows and columns are separate codes."""
    scaling: Any = layer._modules["grad_output_scaling"]
    if torch.compiler.is_compiling():
        handoff = GraphHandoff(is_shared=False)
    is_first = plan.quantizes_grad_first
    codes, amax = scaling.codes_before_product(grad_output_TN, handoff, rows=rows, columns=columns, is_first=is_first)
    if codes is None:
        return Operand(grad_output_TN, None, amax), None
    of_rows, of_columns = (None if each is None else Operand(each.codes, each.dequant_scale) for each in codes)
    first = of_rows if rows else of_columns
    assert first is not None
    return first, of_columns if rows and columns else None


def _input_again(
    layer: Float8Linear, plan: LinearPlan, formats: LinearFormats, saved: Saved, grad_output_TN: Tensor
) -> Operand:
    """Return the input as `linear_gradients` takes it, from what was saved."""
    kept, number = saved
    assert kept is not None
    scaling: Any = layer._modules["input_scaling"]
    if formats.activation is None:
        assert number is not None
        return Operand(scaling.kept_columns(kept), number)
    if "output" in plan.high_precision:
        codes, scale, _ = scaling.activate_again(kept, formats.activation, grad_output_TN)
        return Operand(codes, scale)
    return Operand(kept, None, number)


def _before_activation(activation: str, grad: Tensor, x: Tensor, handoff: Handoff | None) -> Tensor:
    """Return dL/dx, given dL/d(activation(x)). activation: one of kernels' ACTIVATIONS."""
    if handoff is None:
        return kernels.ACTIVATIONS[activation].backward(grad, x)
    return write_gradients(grad, x, activation, None, (handoff, None))[0]
