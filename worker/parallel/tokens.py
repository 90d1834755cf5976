"""The collectives of sequence parallelism: what ranks of the tensor axis do with activations whose tokens they divide.

Between layers each rank has some tokens of every sequence. The input of column layers is gathered, and the outputs of row
layers, partial sums of all tokens, are added up into each rank's tokens (Korthikanti et al. 2022, arXiv 2205.05198).
Where the layers multiply in FP8 with one scale for the tensor, codes travel: the ranks agree on the amax before the cast, so
that every rank holds the codes that one process would make. Other operands travel as values, in bf16 where the layers round to
it, and each layer quantizes all tokens itself.

Shape suffixes: B sequences, T all tokens of each, t this rank's, D features, R ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.fp8.bf16 import HalfLinear
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.operand import OperandScaling
from octet.worker.fp8.recipe import ALL_GEMMS
from octet.worker.kernels import ScaledCodes, ScaleKind
from octet.worker.mesh import Axis


class ColumnInput:
    """The input of column layers that all read the same one: gathered once in each pass, in codes or as values."""

    def __init__(self, layers: Sequence[nn.Module], axis: Axis) -> None:
        self.layers, self.axis = layers, axis
        self._again: tuple[Tensor, Tensor] | None = None  # what was gathered again, and all tokens of it
        self._num_readers = 0
        for layer in layers:
            if isinstance(layer, Float8Linear):
                layer.input_scaling.regather = self._regather

    def __call__(self, own_BtD: Tensor) -> Tensor:
        """Return the input of all tokens; its gradients are added up into each rank's tokens.

        Where the layers take it in codes, the result only has its shape: its values are NaN, and
        take no memory.
        """
        whole_BTD: Tensor = _ColumnInput.apply(own_BtD, self)
        return whole_BTD

    def give_codes(self, own_BtD: Tensor) -> bool:
        """Gather the input in codes and give them to the layers. False if they do not all take the same codes."""
        scalings = [
            layer.input_scaling
            for layer in self.layers
            if isinstance(layer, Float8Linear) and takes_codes(layer, "input", "output", "grad_weight")
        ]
        for scaling in scalings:
            scaling.gathered_codes = None
        if len(scalings) < len(self.layers):
            return False
        own, amax = _codes_of(own_BtD, scalings[0], self.axis)
        kept = own._replace(codes=own.codes.view(own_BtD.shape))
        rows = own._replace(codes=gather_tokens(kept.codes, self.axis).flatten(0, 1))
        for scaling in scalings:
            scaling.gathered_codes = rows, kept
            if scaling is not scalings[0]:
                scaling.follow(scalings[0], amax)
        return True

    def _regather(self, kept_BtD: Tensor) -> Tensor:
        """Codes of all tokens once more, for the weight gradients of all layers."""
        if self._again is None or self._again[0].data_ptr() != kept_BtD.data_ptr():
            self._again = kept_BtD, gather_tokens(kept_BtD, self.axis).flatten(0, 1)
            self._num_readers = sum(layer.get_parameter("weight").requires_grad for layer in self.layers)
        whole_TD = self._again[1]
        self._num_readers -= 1
        if not self._num_readers:
            self._again = None
        return whole_TD


def row_output(partial_BTD: Tensor, layer: nn.Module, axis: Axis) -> Tensor:
    """Return this rank's tokens of the sum of all ranks' parts. Its gradient is gathered, in codes or as values."""
    own_BtD: Tensor = _RowOutput.apply(partial_BTD, layer, axis)
    return own_BtD


def split_tokens(whole_BTD: Tensor, axis: Axis) -> Tensor:
    """Return this rank's tokens of an activation that all ranks have alike. The gradient of all tokens is gathered."""
    if whole_BTD.dim() != 3 or whole_BTD.shape[1] % axis.size:
        raise ValueError(
            f"an activation of shape {tuple(whole_BTD.shape)} cannot be divided along its tokens; allowed with sequence: "
            f"(sequences, tokens, features), with a multiple of {axis.size} tokens. Change the sequence length or the degree."
        )
    own_BtD: Tensor = _SplitTokens.apply(whole_BTD, axis)
    return own_BtD


def join_tokens(own_BtD: Tensor, axis: Axis) -> Tensor:
    """Return the activation of all tokens, whose gradient is the same on all ranks."""
    whole_BTD: Tensor = _JoinTokens.apply(own_BtD, axis)
    return whole_BTD


def gather_tokens(own_BtD: Tensor, axis: Axis) -> Tensor:
    """Gather all ranks' tokens, (B, T, D), in any dtype."""
    gathered_RBtD = axis.start_gather(own_BtD).wait()
    in_order = gathered_RBtD.view(torch.uint8).transpose(0, 1).flatten(1, 2)
    return in_order.view(own_BtD.dtype)


def sum_tokens(partial_BTD: Tensor, axis: Axis) -> Tensor:
    """Add up all ranks' parts into each rank's tokens: (B, t, D), in the dtype of the parts."""
    parts_RBtD = partial_BTD.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous()
    return axis.sum_shares(parts_RBtD.flatten(1)).view(parts_RBtD.shape[1:])


def _own_tokens(whole_BTD: Tensor, axis: Axis) -> Tensor:
    return whole_BTD.unflatten(1, (axis.size, -1))[:, axis.rank].contiguous()


class _ColumnInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_BtD: Tensor, input: ColumnInput) -> Tensor:
        ctx.axis = axis = input.axis
        if not input.give_codes(own_BtD):
            wire_dtype = _wire_dtype(input.layers, own_BtD.dtype)
            return gather_tokens(own_BtD.to(wire_dtype), axis).to(own_BtD.dtype)
        num_sequences, num_own, num_features = own_BtD.shape
        return own_BtD.new_full((), torch.nan).expand(num_sequences, axis.size * num_own, num_features)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return sum_tokens(grad_BTD, ctx.axis), None


class _RowOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_BTD: Tensor, layer: nn.Module, axis: Axis) -> Tensor:
        ctx.layer, ctx.axis = layer, axis
        ctx.takes_codes = takes_codes(layer, "grad_output", "grad_input", "grad_weight")
        ctx.wire_dtype = _wire_dtype((layer,), partial_BTD.dtype)
        return sum_tokens(partial_BTD, axis)

    @staticmethod
    def backward(ctx: Any, grad_BtD: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of all tokens. Where the layer takes it in codes, the result only has its shape."""
        axis: Axis = ctx.axis
        if not ctx.takes_codes:
            return gather_tokens(grad_BtD.to(ctx.wire_dtype), axis).to(grad_BtD.dtype), None, None
        scaling = ctx.layer.grad_output_scaling
        own, _ = _codes_of(grad_BtD, scaling, axis)
        rows = own._replace(codes=gather_tokens(own.codes.view(grad_BtD.shape), axis).flatten(0, 1))
        scaling.gathered_codes = rows, rows.t()
        num_sequences, num_own, num_features = grad_BtD.shape
        return grad_BtD.new_full((), torch.nan).expand(num_sequences, axis.size * num_own, num_features), None, None


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole_BTD: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _own_tokens(whole_BTD, axis)

    @staticmethod
    def backward(ctx: Any, grad_BtD: Tensor) -> tuple[Tensor, None]:
        return gather_tokens(grad_BtD, ctx.axis), None


class _JoinTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_BtD: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return gather_tokens(own_BtD, axis)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return _own_tokens(grad_BTD, ctx.axis), None


def _codes_of(own_BtD: Tensor, scaling: OperandScaling, axis: Axis) -> tuple[ScaledCodes, Tensor]:
    """This rank's tokens in codes, with the scale of all ranks' tokens, and their amax ()."""
    own = own_BtD.reshape(-1, own_BtD.shape[-1])
    amax = axis.max_(kernels.compute_amax(own))
    scaling.gathered_codes = None
    rows, _ = scaling.quantize(own, amax=amax, columns=False)
    assert rows is not None
    return rows, amax


def takes_codes(layer: nn.Module, operand: str, *products: str) -> bool:
    """Return True if the layer multiplies an operand in these products in FP8, with one scale for the tensor."""
    if not isinstance(layer, Float8Linear) or getattr(layer.recipe, operand).kind is not ScaleKind.TENSOR:
        return False
    return not layer.high_precision & set(products)


def _wire_dtype(layers: Sequence[nn.Module], dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values travel: the one that all layers round them to first, or else their own."""
    rounded = {
        layer.compute_dtype
        if isinstance(layer, HalfLinear)
        else torch.bfloat16
        if isinstance(layer, Float8Linear) and layer.high_precision == ALL_GEMMS
        else dtype
        for layer in layers
    }
    return rounded.pop() if len(rounded) == 1 else dtype
