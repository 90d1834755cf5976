"""The usual passes of an FP8 layer with delayed scaling, in eager code: few ops, and few calls around them.

Usual is what `usual.py` says, but for the window. One op quantizes an operand and raises the amax of the step. A weight that is
held in values is quantized again in the backward pass by the amax of the forward pass, and leaves no second trace. Everything
else is computed step by step by `linear.py`, to the same bits.
Shape suffixes as there; an input may have more dimensions before the last.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from worker import kernels
from worker.fp8.gradient_hooks import once_differentiable, product_dtype
from worker.fp8.operand import ForwardPass, OperandScaling
from worker.fp8.recipe import E4M3
from worker.fp8.shapes import cast, shaped
from worker.kernels import ScaledCodes, ScaleKind

if TYPE_CHECKING:
    from worker.fp8.linear import Float8Linear

_TENSOR = ScaleKind.TENSOR


def is_usual_by_window(layer: "Float8Linear") -> bool:
    """Whether a pass is eager, and the layer's weight held in values or in the codes that its products take."""
    if torch.compiler.is_compiling():
        return False
    return layer._buffers["weight_dequant_scale"] is None or layer.weight.dtype == E4M3


class DelayedProducts(torch.autograd.Function):
    """`linear.Float8Products` of a usual pass, which adds the bias too. It keeps the same for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias_N: Tensor | None, layer: "Float8Linear", how: ForwardPass
    ) -> Tensor:
        """Arguments as for Float8Products, bias_N of any product. input: (..., K), and the result (..., N)."""
        output_dtype, activation, _, notes, carried, keeps = how
        shape, recipe, scalings = input.shape, layer.recipe, layer._modules
        input_TK = input if len(shape) == 2 else input.reshape(-1, shape[-1])
        scaling: Any = scalings["input_scaling"]
        columns, codes = keeps and ctx.needs_input_grad[1], None
        saved: tuple[Tensor | None, Tensor | None] = (None, None)
        rows: ScaledCodes | None
        if activation is not None:
            made, scale, amax = scaling.quantize_by_window(input_TK, "rows", activation)
            rows, saved = ScaledCodes(made, scale, _TENSOR), (input, amax)
        else:
            if carried is not None:
                codes = carried.codes_for(scaling, input_TK, rows=True, columns=columns)
            rows, of_columns = codes or _by_window(scaling, input_TK, "both" if columns else "rows", None)
            saved = (None, None) if of_columns is None else of_columns[:2]
        unit, weight_amax = layer._buffers["weight_dequant_scale"], None
        if unit is None:
            of_weight: Any = scalings["weight_scaling"]
            known = layer._buffers["weight_amax"]
            weight_NK, weight_scale, weight_amax = of_weight.quantize_by_window(weight.detach(), "rows", None, known)
        else:
            weight_NK, weight_scale = weight.detach(), unit
        assert rows is not None
        output_TN = kernels.multiply(rows, ScaledCodes(weight_NK, weight_scale, _TENSOR), output_dtype, fast_accumulation=True)
        ctx.save_for_backward(*saved, weight, unit, weight_amax)
        bias_dtype = None if bias_N is None else bias_N.dtype
        ctx.how = layer, recipe, activation, notes, input.dtype, product_dtype(weight, layer.gradient_position), bias_dtype
        if bias_N is not None:
            output_TN = output_TN.add_(cast(bias_N, output_dtype))
        return output_TN if len(shape) == 2 else shaped(output_TN, (*shape[:-1], output_TN.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        layer, recipe, activation, notes, input_dtype, grad_weight_dtype, bias_dtype = ctx.how
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        shape = grad_output.shape
        grad_output_TN = grad_output if len(shape) == 2 else grad_output.reshape(-1, shape[-1])
        grad_input_TK = grad_weight = input_saved = None
        if needs_input or needs_weight:
            # reading them checks that the weight is unchanged
            input_saved, input_number, weight, unit, weight_amax = ctx.saved_tensors
            if activation is not None:
                input_saved = input_saved.reshape(-1, input_saved.shape[-1])
            scaling = layer._modules["grad_output_scaling"]
            rows, columns = _codes_of_gradient(scaling, notes, grad_output_TN, rows=needs_input, columns=needs_weight)
        if needs_input:
            if unit is None:
                weight = weight.detach()
                how: Any = {"margin": recipe.margin, "sides": "columns", "amax": weight_amax}
                weight_KN = kernels.quantize_operand(weight, recipe.weight.dtype, _TENSOR, **how).columns
            else:
                weight_KN = ScaledCodes(weight.detach(), unit, _TENSOR).t()
            assert rows is not None
            assert weight_KN is not None
            grad_input_TK = kernels.multiply(rows, weight_KN, input_dtype)
        if needs_weight:
            assert input_saved is not None
            if activation is None:
                input_KT = ScaledCodes(input_saved, input_number, _TENSOR)
            else:
                input_KT = layer._modules["input_scaling"].activate_again(input_saved, activation, input_number, grad_output_TN)
            assert columns is not None
            grad_weight = kernels.multiply(columns, input_KT, grad_weight_dtype)
        if grad_input_TK is not None and activation is not None:
            grad_input_TK = notes.before_activation(activation, grad_input_TK, input_saved)
        if grad_input_TK is not None and len(shape) != 2:
            grad_input_TK = grad_input_TK.view(*shape[:-1], -1)
        grad_bias_N = cast(grad_output_TN.sum(0), bias_dtype) if needs_bias else None
        return grad_input_TK, grad_weight, grad_bias_N, None, None


def _by_window(
    scaling: OperandScaling, x: Tensor, sides: str, amax: Tensor | None
) -> tuple[ScaledCodes | None, ScaledCodes | None]:
    """What `scaling.quantize` makes of x for its rows and its columns, by one op. amax: of x, where it is known."""
    *codes, scale, _ = scaling.quantize_by_window(x, sides, None, amax)
    rows = None if sides == "columns" else ScaledCodes(codes[0], scale, _TENSOR)
    return rows, None if sides == "rows" else ScaledCodes(codes[-1], scale, _TENSOR)


def _codes_of_gradient(
    scaling: OperandScaling, notes: Any, grad_output_TN: Tensor, *, rows: bool, columns: bool
) -> tuple[ScaledCodes | None, ScaledCodes | None]:
    """The codes of a gradient: those that ranks have gathered, those that were written with it, or new ones."""
    if scaling.given is not None:
        return scaling.quantize(grad_output_TN, rows=rows, columns=columns)
    told = None if notes.own is None else notes.own.take(grad_output_TN)
    if told is not None and told.codes is not None and told.ahead is not None and rows:
        codes = told.codes.view(grad_output_TN.shape)
        return scaling.complete(codes, grad_output_TN, told.amax, told.ahead, columns=columns)
    sides = "both" if rows and columns else "rows" if rows else "columns"
    return _by_window(scaling, grad_output_TN, sides, None if told is None else told.amax)


delayed_apply = super(torch.autograd.Function, DelayedProducts).apply
"""As in `usual.py`."""
