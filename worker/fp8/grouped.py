"""The products of all layers of a stack at once, whose launches do not grow with the number of layers.

`experts.py` calls it for experts that multiply in FP8 by scales of the tensor, of the one at hand or of past steps. Layers are
multiplied one by one where something else has to see an operand before its product (a sample of statistics, selective
checkpointing), and where they differ from each other, as demoted ones do. The bits are the same.

Autograd sees one function with the weights of all layers. Gradients that are held in FP8 arrive as codes, made in one op too;
until then a stack's gradients are wide together.

Shape suffixes: E layers, S rows of all of them, K in features, N out features, P columns of padded runs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octet.worker import kernels
from octet.worker.fp8.bf16 import activation_dtype
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.gradient_hooks import once_differentiable, product_dtype
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.operand import OperandScaling, amaxes_to_scale_by
from octet.worker.fp8.weight import Float8Weight
from octet.worker.kernels import Operand, Operands
from octet.worker.kernels.formats import E4M3


class Exchange:
    """Codes of the next operands of a stack, which ranks have sent each other: of its input, and of its outputs' gradient.

    Each is an operand of all runs, with a dequant_scale (E,). The tensor in its place then only has its shape.
    """

    input: Operand | None = None
    grad_output: Operand | None = None


def are_grouped(layers: Sequence[Any]) -> bool:
    """Return True for layers whose products are computed together. It changes with their mode, and with what a step samples."""
    first = layers[0]
    if not isinstance(first, Float8Linear) or not first.plan.is_grouped:
        return False
    kind, plan, holds_codes = type(first), first.plan, first.plan.holds_codes
    is_trained, has_bias = first.weight.requires_grad, first.bias is not None
    for layer in layers:
        weight = layer._parameters.get("weight")
        if (
            type(layer) is not kind
            or layer.plan is not plan
            or weight is None  # a parametrization's
            or (type(weight) is Float8Weight) is not holds_codes
            or weight.requires_grad is not is_trained
            or (layer._parameters.get("bias") is not None) is not has_bias
            or layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
            or "forward" in vars(layer)
        ):
            return False
    return True


def grouped_linear(layers: Sequence[Float8Linear], input_SK: Tensor, counts: list[int], exchange: Exchange) -> Tensor:
    """Multiply each run of rows by the weight of its layer, (S, N).

    layers: such that `are_grouped`. counts: rows of each run. The next operands come from `exchange`, where ranks gave them.
    """
    weights: list[Any] = [layer.weight for layer in layers]
    for weight in weights:
        if type(weight) is Float8Weight and weight.state.entries:
            weight.state.take_back()
    biases = [] if layers[0].bias is None else [layer.bias for layer in layers]
    given, exchange.input = exchange.input, None
    settings = _Pass(layers, counts, activation_dtype(input_SK), given, exchange, torch.is_grad_enabled())
    output_SN: Tensor = _GroupedProducts.apply(input_SK, settings, *weights, *biases)
    return output_SN


class _Pass(NamedTuple):
    """The settings of a forward pass. given: the input in codes. keeps: autograd is on."""

    layers: Sequence[Float8Linear]
    counts: list[int]
    output_dtype: torch.dtype
    given: Operand | None
    exchange: Exchange
    keeps: bool


class _GroupedProducts(torch.autograd.Function):
    """The three products of each layer, and the biases."""

    @staticmethod
    def forward(ctx: Any, input_SK: Tensor, settings: _Pass, *parameters: Tensor) -> Tensor:
        layers, counts, output_dtype, given, exchange, keeps = settings
        first = layers[0]
        weights = _held(parameters[: len(layers)], first)
        biases = parameters[len(layers) :]
        ctx.layers, ctx.counts, ctx.exchange, ctx.has_bias = layers, counts, exchange, bool(biases)
        ctx.input_dtype = input_SK.dtype
        ctx.grad_weight_dtype = product_dtype(first.weight, first.gradient_position)
        ctx.bias_dtype = biases[0].dtype if biases else None
        ctx.needs_weight = keeps and ctx.needs_input_grad[2]
        operand = _operand(input_SK, counts, [layer.input_scaling for layer in layers]) if given is None else given
        weights = _scaled(weights, layers, counts)
        output_SN, *kept = kernels.grouped_output(
            operand, counts, weights, first.plan.formats, output_dtype, keeps_columns=ctx.needs_weight
        )
        if biases:
            repeats = torch.tensor(counts, pin_memory=input_SK.device.type == "cuda").to(input_SK.device, non_blocking=True)
            output_SN += torch.stack(biases).to(output_dtype).repeat_interleave(repeats, 0, output_size=len(input_SK))
        columns = kept[:2] if ctx.needs_weight else [None, None]
        amaxes = weights.amaxes or ([] if first.plan.multiplies_codes else list(kept[-1].unbind()))
        ctx.save_for_backward(*columns, *weights.data, *weights.dequant_scales, *amaxes)
        ctx.is_stored = first.plan.holds_codes
        return output_SN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output_SN: Tensor) -> tuple[Any, ...]:
        layers, counts, exchange = ctx.layers, ctx.counts, ctx.exchange
        # Reading them checks that the weights are unchanged.
        columns_KP, scales_E, *held = ctx.saved_tensors
        num = len(layers)
        data, *rest = (held[first : first + num] for first in range(0, len(held), num))
        weights = Operands(data, rest.pop(0) if ctx.is_stored else [], rest[0] if rest else [])
        operand, exchange.grad_output = exchange.grad_output, None
        if operand is None:
            operand = _operand(grad_output_SN, counts, [layer.grad_output_scaling for layer in layers])
        needs_input = ctx.needs_input_grad[0]
        grad_input, grad_weights = None, [None] * len(layers)
        if needs_input or ctx.needs_weight:
            sides = "both" if needs_input and ctx.needs_weight else "rows" if needs_input else "columns"
            columns = None if columns_KP is None else Operand(columns_KP, scales_E)
            dtypes, in_codes = (ctx.input_dtype, ctx.grad_weight_dtype), ctx.needs_weight and _take_codes(layers)
            gradients = kernels.grouped_gradients(
                operand, counts, columns, weights, layers[0].plan.formats, sides, dtypes, finds_amax=in_codes
            )
            grad_input = gradients.pop(0) if needs_input else None
            grad_weights = _delivered(layers, *gradients) if ctx.needs_weight else grad_weights
        grad_biases: list[Any] = []
        if ctx.has_bias:
            grad_biases = [*kernels.sum_runs(grad_output_SN, counts).to(ctx.bias_dtype).unbind()]
        return grad_input, None, *grad_weights, *grad_biases


def _held(weights: Sequence[Tensor], first: Float8Linear) -> Operands:
    """Return weights in the form that layers hold them: values, or codes with their numbers."""
    if not first.plan.holds_codes:
        return Operands(list(weights), [], [])
    coded: Any = weights
    amaxes = [] if first.plan.multiplies_codes else [weight.values_amax for weight in coded]
    return Operands([weight.codes for weight in coded], [weight.dequant_scale for weight in coded], amaxes)


def _operand(values: Tensor, counts: list[int], scalings: Sequence[OperandScaling]) -> Operand:
    """Return values of runs as their op takes them: with the amaxes to scale by, where windows say them."""
    if not scalings[0].has_window:
        return Operand(values)
    return Operand(values, None, amaxes_to_scale_by(scalings, kernels.amax_of_runs(values, counts), counts))


def _scaled(weights: Operands, layers: Sequence[Float8Linear], counts: list[int]) -> Operands:
    """Return weights with the amaxes to scale by, where windows say them."""
    scalings = [layer.weight_scaling for layer in layers]
    if not scalings[0].has_window or layers[0].plan.multiplies_codes:
        return weights
    own_E = torch.stack(weights.amaxes) if weights.amaxes else kernels.amax_of_each(weights.data)
    return weights._replace(amaxes=list(amaxes_to_scale_by(scalings, own_E, counts).unbind()))


def _take_codes(layers: Sequence[Float8Linear]) -> bool:
    """Return True if the gradients of weights are held in codes, and made now.

    What is added to gradients of earlier micro-batches is rounded with these, so it stays wide.
    """
    return all(layer.gradient_position is not None and layer.weight.grad is None for layer in layers)


def _delivered(layers: Sequence[Float8Linear], grad_weight: Tensor, amax_E: Tensor | None = None) -> list[Any]:
    """Return the gradient of each weight, (E, N, K) or (E, K, N) as it is stored, as autograd gets it. amax_E: for codes."""
    if amax_E is None:
        return [*grad_weight.unbind()]
    codes, scales_E = kernels.quantize_gradients(grad_weight, amax_E, E4M3.dtype)
    positions = [layer.gradient_position for layer in layers]
    parts: Any = zip(codes.unbind(), scales_E.unbind(), positions, strict=True)
    return [Float8Gradient(*each) for each in parts]
