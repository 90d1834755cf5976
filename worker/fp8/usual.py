"""The usual passes of an FP8 layer as one op each, which take the host a fraction of the time of their parts.

Usual is: an accelerator, all products in FP8, each operand with one scale, nothing sampled, whole tiles. The scale is found
now, here, or comes from a window of past steps, in `delayed.py`.
Everything else is computed step by step by `linear.py`, to the same bits. What a pass needs of its layer is read from the
layer's own dictionaries in each pass: `nn.Module` takes ten times as long to find a parameter.
Shape suffixes as there; an input in eager code may have more dimensions before the last.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from worker import kernels
from worker.fp8.accelerator import is_accelerator
from worker.fp8.bf16 import activation_dtype
from worker.fp8.carried import carried_by
from worker.fp8.delayed import DelayedProducts, delayed_apply, is_usual_by_window
from worker.fp8.fallback import Fallback
from worker.fp8.gradient_hooks import once_differentiable, product_dtype
from worker.fp8.gradient_notes import note_on, notes_of_pass
from worker.fp8.in_graph import amax_in_graph
from worker.fp8.operand import ForwardPass
from worker.fp8.recipe import Recipe
from worker.fp8.shapes import cast, shaped
from worker.kernels import ScaleKind
from worker.kernels.gemm import ALIGNMENT

if TYPE_CHECKING:
    from worker.fp8.linear import Float8Linear


def is_usual_layer(recipe: Recipe, num_in: int, num_out: int, *, is_transposed: bool) -> bool:
    """Whether a layer's passes are usual, as far as the layer itself decides."""
    is_simple = not recipe.high_precision and not is_transposed
    has_one_scale = all(operand.kind is ScaleKind.TENSOR for operand in recipe.operands().values())
    return is_simple and has_one_scale and not num_in % ALIGNMENT and not num_out % ALIGNMENT


def is_usual_pass(layer: "Float8Linear", input: Tensor) -> bool:
    """Whether this forward pass of a layer, of an input (..., K), is usual."""
    if not layer.is_usual or layer.fallback is not Fallback.NONE or not (layer.training or layer.recipe.fp8_in_evaluation):
        return False
    num_elements, scaling = input.numel(), _scaling_of(layer, "input_scaling")
    return (
        num_elements > 0
        and not num_elements % (ALIGNMENT * layer.in_features)
        and input.shape[-1] == layer.in_features
        and is_accelerator(input.device)
        and scaling.regather is None
        and not (scaling.is_sampled and layer.training)
        and (not layer.recipe.amax_history_length or is_usual_by_window(layer))
    )


def usual_output(layer: "Float8Linear", input: Tensor, activation: str | None) -> Tensor:
    """The output (..., N) of a usual pass of a layer, in eager code. activation: as for ForwardPass."""
    weight, bias_N = parameter_of(layer, "weight"), parameter_of(layer, "bias")
    transforms = torch._C._are_functorch_transforms_active()
    if layer.recipe.amax_history_length:
        carried = carried_by(input) if activation is None else None
        notes, keeps = notes_of_pass(layer, input, activation), torch.is_grad_enabled()
        how = ForwardPass(activation_dtype(input), activation, None, notes, carried, keeps)
        output: Tensor = (DelayedProducts.apply if transforms else delayed_apply)(input, weight, bias_N, layer, how)
        return output if notes.own is None else note_on(output, notes.own)
    carried = codes = None
    if activation is None and (carried := carried_by(input)) is not None and carried.made:
        needs_columns = torch.is_grad_enabled() and weight.requires_grad
        codes = carried.shared(layer.input_scaling, rows=True, columns=needs_columns)
    notes = notes_of_pass(layer, input, activation)
    how = ForwardPass(activation_dtype(input), activation, codes, notes, carried, torch.is_grad_enabled())
    output = (UsualProducts.apply if transforms else _apply)(input, weight, bias_N, layer, how)
    return output if notes.own is None else note_on(output, notes.own)


class UsualProducts(torch.autograd.Function):
    """`linear.Float8Products` of a usual pass, which adds the bias too. It keeps the same for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias_N: Tensor | None,
        layer: "Float8Linear",
        how: ForwardPass,
    ) -> Tensor:
        """Arguments as for Float8Products, bias_N of any product. input: (..., K), and the result (..., N)."""
        output_dtype, activation, codes, notes, carried, keeps = how
        shape, recipe = input.shape, layer.recipe
        is_matrix = len(shape) == 2
        input_TK = input if is_matrix else input.reshape(-1, shape[-1])
        weight_NK = weight
        is_compiling = torch.compiler.is_compiling()
        if is_compiling:  # then the argument may be the port of its gradient
            weight_NK, unit, weight_amax = layer.weight, layer.weight_dequant_scale, layer.weight_amax
        else:
            held = layer._buffers
            unit, weight_amax = held["weight_dequant_scale"], held["weight_amax"]
        if unit is None:  # found once, for the backward pass too
            weight_amax = amax_in_graph(weight_NK) if is_compiling else None
            weight_amax = kernels.compute_amax(weight_NK) if weight_amax is None else weight_amax
        of_weight = weight_NK, unit, weight_amax
        if codes is not None:
            rows, columns = codes
            assert rows is not None
            output_TN = kernels.linear_product(
                rows.codes, rows.dequant_scale, *of_weight, recipe.weight.dtype, recipe.margin, output_dtype
            )
            kept = [] if columns is None else [columns.codes, columns.dequant_scale]
        else:
            sides = "both" if activation is None and keeps and ctx.needs_input_grad[1] else "rows"
            amax = carried.amax if carried is not None else amax_in_graph(input_TK, activation) if is_compiling else None
            output_TN, *kept = kernels.linear_output(
                input_TK, *of_weight, recipe.input.dtype, recipe.weight.dtype, recipe.margin, activation, sides, output_dtype,
                amax, carried is not None,
            )  # fmt: skip
            if carried is not None:
                kept = carried.share(layer.input_scaling, *kept)
        saved = (None, None) if not kept else (input, kept[0]) if activation is not None else (kept[0], kept[1])
        ctx.save_for_backward(*saved, weight, unit, weight_amax)
        grad_weight_dtype = product_dtype(weight, layer.gradient_position)
        ctx.how = layer, recipe, activation, notes, input.dtype, grad_weight_dtype, None if bias_N is None else bias_N.dtype
        if bias_N is not None:
            bias_N = cast(bias_N, output_dtype)
            # Of an output that is changed in place, torch 2.11's graphs send back gradients of zero.
            output_TN = output_TN + bias_N if is_compiling else output_TN.add_(bias_N)
        return output_TN if is_matrix else shaped(output_TN, (*shape[:-1], output_TN.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        layer, recipe, activation, notes, input_dtype, grad_weight_dtype, bias_dtype = ctx.how
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        shape = grad_output.shape
        grad_output_TN = grad_output if len(shape) == 2 else grad_output.reshape(-1, shape[-1])
        grad_input_TK = grad_weight = None
        if _scaling_of(layer, "grad_output_scaling").given is not None:  # codes that ranks have gathered
            from worker.fp8.linear import Float8Products  # imports this module

            ctx.layer, ctx.high_precision, ctx.activation = layer, recipe.high_precision, activation
            ctx.notes, ctx.input_dtype, ctx.is_empty, ctx.grad_weight_dtype = notes, input_dtype, False, grad_weight_dtype
            grad_input_TK, grad_weight, *_ = Float8Products.backward(ctx, grad_output_TN)
        elif needs_input or needs_weight:
            # reading them checks that the weight is unchanged
            input_saved, input_number, _, unit, weight_amax = ctx.saved_tensors
            if activation is not None and input_saved is not None:
                input_saved = input_saved.reshape(-1, input_saved.shape[-1])
            is_compiling = torch.compiler.is_compiling()
            weight_NK = layer.weight if is_compiling else parameter_of(layer, "weight")
            sides = "both" if needs_input and needs_weight else "rows" if needs_input else "columns"
            amax = amax_in_graph(grad_output_TN) if is_compiling else None
            amax = notes.amax_of(grad_output_TN) if amax is None else amax
            gradients = kernels.linear_gradients(
                grad_output_TN, amax, input_saved, input_number, weight_NK, unit, weight_amax, recipe.input.dtype,
                recipe.weight.dtype, recipe.grad_output.dtype, recipe.margin, activation, sides, input_dtype,
                grad_weight_dtype,
            )  # fmt: skip
            grad_input_TK, grad_weight = gradients[0] if needs_input else None, gradients[-1] if needs_weight else None
            if activation is not None and grad_input_TK is not None:
                grad_input_TK = notes.before_activation(activation, grad_input_TK, input_saved)
        if grad_input_TK is not None and len(shape) != 2:
            grad_input_TK = grad_input_TK.view(*shape[:-1], -1)
        grad_bias_N = cast(grad_output_TN.sum(0), bias_dtype) if needs_bias else None
        return grad_input_TK, grad_weight, grad_bias_N, None, None


def _scaling_of(layer: "Float8Linear", name: str) -> Any:
    """The scaling of one of a layer's operands."""
    return layer._modules[name]


def parameter_of(module: nn.Module, name: str) -> Any:
    """A parameter of a module, or what took its place as an attribute, as torch's weight_norm and parametrizations do it."""
    held = module._parameters
    return held[name] if name in held else getattr(module, name)


_apply = super(torch.autograd.Function, UsualProducts).apply
"""`UsualProducts.apply` without what torch's own does for transforms of torch.func: it looks at each argument in Python."""
