"""The usual passes of an FP8 layer as one op each, which take the host a fraction of the time of their parts.

Usual is: an accelerator, all products in FP8, each operand with one scale that is found now, nothing sampled, whole tiles.
Everything else is computed step by step by `linear.py`, to the same bits.
Shape suffixes as there.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from worker import kernels
from worker.fp8.accelerator import is_accelerator
from worker.fp8.gradient_hooks import once_differentiable, product_dtype
from worker.fp8.in_graph import amax_in_graph
from worker.fp8.operand import ForwardPass
from worker.fp8.recipe import Recipe
from worker.kernels import ScaleKind
from worker.kernels.gemm import ALIGNMENT

if TYPE_CHECKING:
    from worker.fp8.linear import Float8Linear


def is_usual_layer(recipe: Recipe, num_in: int, num_out: int, *, is_transposed: bool) -> bool:
    """Whether a layer's passes are usual, as far as the layer itself decides."""
    is_simple = not recipe.high_precision and not recipe.amax_history_length and not is_transposed
    has_one_scale = all(operand.kind is ScaleKind.TENSOR for operand in recipe.operands().values())
    return is_simple and has_one_scale and not num_in % ALIGNMENT and not num_out % ALIGNMENT


def is_usual_pass(layer: "Float8Linear", input_TK: Tensor) -> bool:
    """Whether this forward pass of a layer, of which all products are in FP8, is usual."""
    scaling, num_tokens = layer.input_scaling, input_TK.shape[0]
    return (
        layer.is_usual
        and not (scaling.is_sampled and layer.training)
        and scaling.regather is None
        and num_tokens > 0
        and not num_tokens % ALIGNMENT
        and is_accelerator(input_TK.device)
    )


class UsualProducts(torch.autograd.Function):
    """`linear.Float8Products` of a usual pass, which adds the bias too. It keeps the same for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        input_TK: Tensor,
        weight: Tensor,
        bias_N: Tensor | None,
        layer: "Float8Linear",
        how: ForwardPass,
    ) -> Tensor:
        """Arguments as for Float8Products, bias_N of any product."""
        output_dtype, activation, codes, notes = how
        recipe, unit = layer.recipe, layer.weight_dequant_scale
        ctx.is_empty, ctx.high_precision = False, recipe.high_precision
        ctx.grad_weight_dtype = product_dtype(weight, layer.gradient_position)
        ctx.layer, ctx.activation, ctx.notes, ctx.input_dtype = layer, activation, notes, input_TK.dtype
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        needs_weight, weight_amax = ctx.needs_input_grad[1], layer.weight_amax
        if unit is None:  # found once, for the backward pass too
            weight_amax = amax_in_graph(layer.weight)
            weight_amax = kernels.compute_amax(layer.weight) if weight_amax is None else weight_amax
        if codes is not None:
            rows, columns = codes
            assert rows is not None
            output_TN = kernels.linear_product(
                rows.codes, rows.dequant_scale, layer.weight.detach(), unit, weight_amax, recipe.weight.dtype, recipe.margin,
                output_dtype,
            )  # fmt: skip
            kept = [] if columns is None else [columns.codes, columns.dequant_scale]
        else:
            output_TN, *kept = kernels.linear_output(
                input_TK, layer.weight, unit, weight_amax, recipe.input.dtype, recipe.weight.dtype, recipe.margin,
                activation, "both" if needs_weight and activation is None else "rows", output_dtype,
                amax_in_graph(input_TK, activation),
            )  # fmt: skip
        saved = (None, None) if not kept else (input_TK, kept[0]) if activation is not None else (kept[0], kept[1])
        ctx.save_for_backward(*saved, weight, unit, weight_amax)
        if bias_N is None:
            return output_TN
        if torch.compiler.is_compiling():  # of an output changed in place, torch 2.11's graphs send back gradients of zero
            return output_TN + bias_N.to(output_dtype)
        return output_TN.add_(bias_N.to(output_dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output_TN: Tensor) -> tuple[Tensor | None, ...]:
        layer, activation, recipe = ctx.layer, ctx.activation, ctx.layer.recipe
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_input_TK = grad_weight = None
        if layer.grad_output_scaling.given is not None:  # codes that ranks have gathered
            from worker.fp8.linear import Float8Products  # imports this module

            grad_input_TK, grad_weight, *_ = Float8Products.backward(ctx, grad_output_TN)
        elif needs_input or needs_weight:
            # reading them checks that the weight is unchanged
            input_saved, input_number, _, unit, weight_amax = ctx.saved_tensors
            sides = "both" if needs_input and needs_weight else "rows" if needs_input else "columns"
            amax = amax_in_graph(grad_output_TN)
            amax = ctx.notes.amax_of(grad_output_TN) if amax is None else amax
            gradients = kernels.linear_gradients(
                grad_output_TN, amax, input_saved, input_number, layer.weight, unit, weight_amax, recipe.input.dtype,
                recipe.weight.dtype, recipe.grad_output.dtype, recipe.margin, activation, sides, ctx.input_dtype,
                ctx.grad_weight_dtype,
            )  # fmt: skip
            grad_input_TK, grad_weight = gradients[0] if needs_input else None, gradients[-1] if needs_weight else None
            if activation is not None and grad_input_TK is not None:
                grad_input_TK = ctx.notes.before_activation(activation, grad_input_TK, input_saved)
        grad_bias_N = grad_output_TN.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return grad_input_TK, grad_weight, grad_bias_N, None, None
