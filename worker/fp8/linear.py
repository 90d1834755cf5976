"""The FP8 linear layer and its three matrix products.

    output_TN      = input_TK @ weight_NK.T             e4m3 x e4m3
    grad_input_TK  = grad_output_TN @ weight_NK         e5m2 x e4m3, or e4m3 x e4m3
    grad_weight_NK = grad_output_TN.T @ input_TK        e5m2 x e4m3, or e4m3 x e4m3

Each may be left in bf16 by the recipe. What waits for the backward pass is the input's FP8 codes and scale, not the input
itself (unless grad_weight is left in bf16). A layer that computes the activation before it (`sequence.py`) keeps neither:
the activation's input is kept for its own derivative anyway, and all else is made of it once more. A weight that is not held in
FP8 is quantized, or decoded to bf16, again in the backward pass: cheaper than a second copy of every weight in between.

Shape suffixes: T tokens (all leading dimensions), K in features, N out features.
"""

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from api_schemas.recipe import GemmName
from worker import kernels
from worker.fp8.bf16 import activation_dtype, half_linear, half_matmul
from worker.fp8.carried import carried_by
from worker.fp8.fallback import Fallback
from worker.fp8.gradient import RoundingPosition
from worker.fp8.gradient_hooks import keep_gradient_in_fp8, once_differentiable, open_port, product_dtype, zero_gradients
from worker.fp8.gradient_notes import note_on, notes_of_pass
from worker.fp8.guards import GuardedCodes
from worker.fp8.layout import layout_of
from worker.fp8.operand import ForwardPass, OperandScaling, product
from worker.fp8.recipe import ALL_GEMMS, E4M3, Recipe
from worker.fp8.usual import UsualProducts, is_usual_layer, is_usual_pass, usual_output
from worker.fp8.weights import EncodedWeight
from worker.kernels import ScaledCodes, ScaleKind


class Float8Linear(GuardedCodes):
    """Takes over the parameters of an `nn.Linear` or a `Conv1D` and multiplies in FP8.

    `weight` holds values, or codes with `value = weight * weight_dequant_scale`; its gradient is that of the value. It is
    (N, K), or, where `is_transposed`, (K, N).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_dequant_scale: Tensor | None
    weight_amax: Tensor | None
    weight_residual: Tensor | None
    num_steps: int
    returns_16_bits: ClassVar[bool] = True

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
        super().__init__()
        layout = layout_of(linear)
        assert layout is not None
        self.in_features, self.out_features, self.is_transposed = layout
        self.weight, self.bias = linear.get_parameter("weight"), linear.bias  # type: ignore[assignment]
        self.recipe, shape = recipe, (self.in_features, self.out_features)
        self.is_usual = is_usual_layer(recipe, *shape, is_transposed=self.is_transposed)
        device = self.weight.device
        self.input_scaling = OperandScaling(recipe, recipe.input, device)
        self.weight_scaling = OperandScaling(recipe, recipe.weight, device)
        self.grad_output_scaling = OperandScaling(recipe, recipe.grad_output, device)
        self.gradient_position, self.statistics_every = gradient_position, statistics_every
        self.activation: str | None = None  # what comes right before it in its sequence; one of kernels' ACTIVATIONS
        self.num_breaches = 0  # samples in a row that broke a limit
        self.fallback = Fallback.NONE
        self.register_buffer("weight_dequant_scale", None)
        self.register_buffer("weight_amax", None)  # of the values; the optimizer keeps it
        self.register_buffer("weight_residual", None)
        if encoded_weight is not None:
            self.weight.data, self.weight_dequant_scale, self.weight_amax, self.weight_residual = encoded_weight
        self._prepare_gradient()
        self.start_step(0)
        self.train(linear.training)

    def forward(self, input: Tensor, *, takes_over_activation: bool = False) -> Tensor:
        """takes_over_activation: the input is that of `self.activation`, which is applied first."""
        activation = self.activation if takes_over_activation else None
        is_usual = is_usual_pass(self, input)
        if is_usual and not torch.compiler.is_compiling():
            return usual_output(self, input, activation)
        output_dtype, wide = activation_dtype(input), self.high_precision
        with torch.autocast(input.device.type, enabled=False) if wide else nullcontext():  # it casts products in bf16 alone
            if wide == ALL_GEMMS and self.weight_dequant_scale is None:  # then it is a layer of bf16-amp
                if activation is not None:
                    input = kernels.ACTIVATIONS[activation].forward(input)
                weight_NK = self.weight.t() if self.is_transposed else self.weight
                return half_linear(input, weight_NK, self.bias, torch.bfloat16).to(output_dtype)
            input_TK, codes = input.reshape(-1, self.in_features), None
            if activation is None and (carried := carried_by(input)) is not None:
                columns = "grad_weight" not in wide and torch.is_grad_enabled() and self.weight.requires_grad
                codes = carried.codes_for(self.input_scaling, input_TK, rows="output" not in wide, columns=columns)
            weight: Tensor = self.weight
            if torch.compiler.is_compiling() and weight.requires_grad and self._gradient_port is not None:
                weight = self._gradient_port
            bias_N = self.bias if is_usual or "output" in wide else None  # added on the way out
            how = ForwardPass(output_dtype, activation, codes, notes_of_pass(self, input, activation))
            output_TN = (UsualProducts if is_usual else Float8Products).apply(input_TK, weight, bias_N, self, how)
        if bias_N is None and self.bias is not None:
            output_TN = output_TN + self.bias.to(output_TN.dtype)
        # No view, of which autograd would refuse what a network adds in place, as Falcon does. Nothing else sees output_TN.
        return note_on(torch.ops.aten._unsafe_view(output_TN, (*input.shape[:-1], self.out_features)), how.notes.own)

    @property
    def high_precision(self) -> frozenset[GemmName]:
        """The products that are computed in bf16 in the present mode."""
        uses_fp8 = self.fallback is Fallback.NONE and (self.training or self.recipe.fp8_in_evaluation)
        return self.recipe.high_precision if uses_fp8 else ALL_GEMMS

    def weight_values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight's values in the parameter's shape, as precisely as the layer holds them, or rounded once to dtype."""
        if self.weight_dequant_scale is None:
            return self.weight.detach().to(dtype)
        self.check_residual()
        if self.weight_residual is None:
            return kernels.values_of(self._stored_weight(), dtype)
        return kernels.split_dequantize(self.weight.detach(), self.weight_residual, self.weight_dequant_scale, dtype)

    def weight_operand(self, *, transposed: bool = False, amax: Tensor | None = None) -> ScaledCodes:
        """The weight in FP8, (N, K), or transposed, (K, N): as it is held, or quantized. amax: fp32 (), where it is known."""
        as_held = transposed == self.is_transposed
        if self.weight.dtype == E4M3 and not self.recipe.weight.kind.is_blockwise:
            stored = self._stored_weight()
            return stored if as_held else stored.t()
        held, unit, amax = self.weight.detach(), self.weight_dequant_scale, self.weight_amax if amax is None else amax
        if held.dtype == E4M3:
            held, unit = self.weight_values(), None
        wanted = {"rows": as_held, "columns": not as_held, "is_again": transposed and "output" not in self.high_precision}
        rows, columns = self.weight_scaling.quantize(held, unit=unit, amax=amax, **wanted)
        codes = rows if as_held else columns
        assert codes is not None
        return codes

    def half_weight(self, *, transposed: bool = False) -> Tensor:
        """The weight in bf16, (N, K), or transposed, (K, N)."""
        values = self.weight_values(torch.bfloat16)
        return values if transposed == self.is_transposed else values.t()

    def _stored_weight(self) -> ScaledCodes:
        """The codes that the parameter holds."""
        assert self.weight_dequant_scale is not None
        return ScaledCodes(self.weight.detach(), self.weight_dequant_scale, ScaleKind.TENSOR)

    def hold_values(self) -> None:
        """Hold the weight as a plain parameter of fp32 values from now on, whose gradient is plain, too."""
        if self.weight_dequant_scale is None:
            return
        self.weight = nn.Parameter(self.weight_values(), requires_grad=self.weight.requires_grad)
        self.weight_dequant_scale = self.weight_amax = self.weight_residual = self.gradient_position = None
        self._open_port()

    def extra_repr(self) -> str:
        shape = f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"
        products = str(self.recipe) if self.fallback is Fallback.NONE else f"{self.fallback.name.lower()}, all in bf16"
        activation = "" if self.activation is None else f"after {self.activation}, "
        return f"{activation}{shape}, weight={self.weight.dtype}, {products}"

    def start_step(self, num_steps: int) -> None:
        """Prepare for the forward passes between two optimizer steps, after that many of them."""
        vars(self)["num_steps"] = num_steps
        for scaling in self.scalings().values():  # by `vars`: a module takes ten times as long to set, or find, an attribute
            vars(scaling)["is_sampled"] = self.statistics_every > 0 and num_steps % self.statistics_every == 0

    def get_extra_state(self) -> Tensor:
        """The rest of `state_dict`: counts of steps, of gradient roundings and of breaches; the fallback. int64, (4,)."""
        state = torch.tensor([self.num_steps, 0, self.num_breaches, self.fallback])
        return self.gradient_position.with_count(state, 1) if self.gradient_position else state

    def set_extra_state(self, state: Tensor) -> None:
        num_steps, num_roundings, self.num_breaches, fallback = state.tolist()
        self.start_step(num_steps)
        self.fallback = Fallback(fallback)
        if self.gradient_position:
            self.gradient_position.count = num_roundings

    def scalings(self) -> dict[str, OperandScaling]:
        """The scaling of each operand, by the operand's name."""
        return {name: self._modules[f"{name}_scaling"] for name in ("input", "weight", "grad_output")}  # type: ignore[misc]

    def _prepare_gradient(self) -> None:
        if self.weight_dequant_scale is not None:
            self.weight.grad_dtype = torch.float32
        self._open_port()
        if self.gradient_position is not None and self.weight.requires_grad:
            keep_gradient_in_fp8(self.weight, self.gradient_position)

    def _open_port(self) -> None:
        self._gradient_port = None if self.weight_dequant_scale is None else open_port(self.weight, self.gradient_position)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what a copied or unpickled parameter loses: the dtype of its gradient and the hook."""
        super().__setstate__(state)
        self._prepare_gradient()

    def _apply(self, fn: Any, recurse: bool = True) -> "Float8Linear":
        """Move to another device, or cast what is plain."""
        super()._apply(fn, recurse)
        self._open_port()
        return self


class Float8Products(torch.autograd.Function):
    """The three products. Every operand has the summed dimension last."""

    @staticmethod
    def forward(
        ctx: Any,
        input_TK: Tensor,
        weight: Tensor,
        bias_N: Tensor | None,
        layer: Float8Linear,
        how: ForwardPass,
    ) -> Tensor:
        """bias_N: only where the output is computed in bf16."""
        output_dtype, activation, codes, notes, *_ = how
        wide, scaling = layer.high_precision, layer.input_scaling
        ctx.grad_weight_dtype = product_dtype(weight, layer.gradient_position)
        ctx.is_empty, ctx.notes = input_TK.shape[0] == 0, notes
        if ctx.is_empty:  # nothing to multiply, and nothing that a scale or a window should learn from
            ctx.shapes, ctx.input_dtype = (input_TK.shape, weight.shape), input_TK.dtype
            return input_TK.new_empty((0, layer.out_features), dtype=output_dtype)
        saved: tuple[Tensor | None, Tensor | None] = (input_TK, None)
        input_half = input_rows = None
        if activation is not None and "output" not in wide:  # its codes are needed, its values are not
            input_rows, input_amax = scaling.activate(input_TK, activation)
            saved = (input_TK, input_amax)
        elif activation is not None:
            input_half = kernels.ACTIVATIONS[activation].forward(input_TK).to(torch.bfloat16)
        else:
            rows, columns = "output" not in wide, "grad_weight" not in wide and ctx.needs_input_grad[1]
            made = codes or scaling.quantize(input_TK, rows=rows, columns=columns, transposed_later=True)
            input_rows, input_columns = made
            input_half = input_TK.to(torch.bfloat16) if wide & {"output", "grad_weight"} else None
            saved = (input_half, None) if "grad_weight" in wide else (input_columns or (None, None))[:2]
        ctx.save_for_backward(*saved, weight, layer.weight_dequant_scale)
        ctx.layer, ctx.activation, ctx.high_precision, ctx.input_dtype = layer, activation, wide, input_TK.dtype
        if "output" in wide:
            assert input_half is not None
            return half_linear(input_half, layer.half_weight(), bias_N, torch.bfloat16).to(output_dtype)
        assert input_rows is not None
        return product(input_rows, layer.weight_operand(), output_dtype, fast_accumulation=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output_TN: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_empty:
            return zero_gradients(ctx, grad_output_TN)
        input_saved, input_dequant_scale, *_ = ctx.saved_tensors  # reading them checks that the weight is unchanged
        layer, activation, wide = ctx.layer, ctx.activation, ctx.high_precision
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if activation is not None:
            input_saved = input_saved.reshape(-1, layer.in_features)  # `UsualProducts` keeps the input as it came
        given_TK, scaling = input_saved, layer.grad_output_scaling
        if activation is not None and needs_weight and "grad_weight" in wide:
            input_saved = kernels.activate_again(given_TK, activation, grad_output_TN)
        elif activation is not None and needs_weight:  # what was saved with it is the amax
            again = layer.input_scaling.activate_again(given_TK, activation, input_dequant_scale, grad_output_TN)
            input_saved, input_dequant_scale, _ = again
        rows, columns = needs_input and "grad_input" not in wide, needs_weight and "grad_weight" not in wide
        grad_rows, grad_columns = ctx.notes.quantize(scaling, grad_output_TN, rows=rows, columns=columns)
        grad_input_TK = grad_weight = None
        if needs_input and "grad_input" in wide:
            grad_input_TK = half_matmul(grad_output_TN, layer.half_weight(transposed=True), ctx.input_dtype)
        elif needs_input:
            grad_input_TK = product(grad_rows, layer.weight_operand(transposed=True), ctx.input_dtype)
        if needs_weight and "grad_weight" in wide:
            left, right = grad_output_TN.t(), input_saved.t()
            left, right = (right, left) if layer.is_transposed else (left, right)
            grad_weight = half_matmul(left, right, ctx.grad_weight_dtype)
        elif needs_weight:
            input_columns = layer.input_scaling.kept_columns(input_saved, input_dequant_scale)
            operands = (input_columns, grad_columns) if layer.is_transposed else (grad_columns, input_columns)
            grad_weight = product(operands[0], operands[1], ctx.grad_weight_dtype)
        if activation is not None and grad_input_TK is not None:
            grad_input_TK = ctx.notes.before_activation(activation, grad_input_TK, given_TK)
        grad_bias_N = grad_output_TN.sum(0, dtype=torch.float32) if needs_bias else None
        return grad_input_TK, grad_weight, grad_bias_N, None, None
