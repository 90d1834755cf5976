"""The collectives around a layer that ranks of the tensor axis divide (Shoeybi et al., Megatron-LM, 2019, sec. 3).

A column layer has some of the outputs: its input is the same on all ranks, and the gradients of the
input are added up. A row layer has some of the inputs: its outputs are added up, and the gradient
of the output is the same on all ranks. An embedding has some of the tokens. The layer itself is
unchanged and computes in the formats of its level. A column layer's input and a row layer's
grad_output are equal on all ranks, and so are their amaxes. A row layer's input and a column
layer's grad_output have their own scale on each rank, since their products are decoded before they
are added.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.common.wrap import Nesting, Wrapper, wrap
from octet.worker.mesh import Axis, AxisInBlocks
from octet.worker.models.model import TensorRole


class SharedInput:
    """The input of the column layers of one module, as of queries, keys and values.

    Where they take the same tensor its gradients are added up locally first, and once over the ranks. Nothing is held between
    passes in which each layer takes it.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers, self._num_left = num_layers, 0
        self._input: Tensor | None = None
        self._copied: Tensor | None = None

    def to_shards(self, input: Tensor, axis: AxisInBlocks) -> Tensor:
        """Return what `to_shards` made of the tensor for the first of the layers."""
        if not (input.requires_grad and torch.is_grad_enabled()):
            return to_shards(input, axis)
        copied = self._copied
        if copied is None or self._input is not input:
            copied = to_shards(input, axis)
            self._input, self._copied, self._num_left = input, copied, self._num_layers
        self._num_left -= 1
        if self._num_left == 0:
            self._input = self._copied = None
        return copied

    def __reduce__(self) -> tuple[type["SharedInput"], tuple[int]]:
        """Return what copies and pickles hold: no tensor of a pass that an exception has ended between two layers."""
        return SharedInput, (self._num_layers,)


class ColumnForward(Wrapper):
    """Takes the place of a column layer's `forward`."""

    nesting = Nesting.TENSOR

    def __init__(self, axis: Axis, shared: SharedInput) -> None:
        """shared: by the column layers of the layer's parent."""
        self.axis, self.shared = AxisInBlocks(axis), shared

    def __call__(self, input: Tensor, **options: Any) -> Any:
        return self.run(self.shared.to_shards(input, self.axis), **options)


class RowForward(Wrapper):
    """Takes the place of a row layer's `forward`. Every rank holds the whole bias, which is added once, to the sum."""

    nesting = Nesting.TENSOR

    def __init__(self, axis: Axis) -> None:
        self.axis = AxisInBlocks(axis)

    def __call__(self, input: Tensor, **options: Any) -> Tensor:
        parameters = self.module._parameters
        bias = parameters.get("bias")
        if bias is None:
            return self.add_up(self.run(input, **options))
        parameters["bias"] = None
        try:
            partial = self.run(input, **options)
        finally:
            parameters["bias"] = bias
        return self.add_up(partial) + bias.to(partial.dtype)

    def add_up(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' parts."""
        return sum_of_shards(partial, self.axis)


class EmbeddingForward(Wrapper):
    """Takes the place of an embedding's `forward`: a token that another rank holds counts as zeros."""

    nesting = Nesting.TENSOR

    def __init__(self, axis: Axis) -> None:
        self.axis, self.rank = AxisInBlocks(axis), axis.rank

    def __call__(self, tokens: Tensor) -> Tensor:
        num_own = self.module.get_parameter("weight").shape[0]
        own = tokens - self.rank * num_own
        is_own = (own >= 0) & (own < num_own)
        rows: Tensor = self.run(own.where(is_own, 0))
        return sum_of_shards(rows.where(is_own[..., None], 0.0), self.axis)


def surround(module: nn.Module, role: TensorRole, axis: Axis, shared: SharedInput | None = None) -> None:
    """Wrap a module that holds shards in the collectives of its role. shared: by the column layers of its parent, if any."""
    if role == "partial-gradients":
        for part in module.modules():
            add_up_gradients(part, axis)
    elif role == "row":
        wrap(module, RowForward(axis))
    elif role == "embedding":
        wrap(module, EmbeddingForward(axis))
    else:
        wrap(module, ColumnForward(axis, shared or SharedInput(1)))


def add_up_gradients(module: nn.Module, axis: Axis) -> None:
    """Add up the gradients of a module's own parameters over the axis: each rank applies them to its part."""
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: axis.sum_(gradient.clone()))


def to_shards(input: Tensor, axis: AxisInBlocks) -> Tensor:
    """Return the input, whose gradients, one from each rank's shard, will be added up over the axis."""
    copied: Tensor = _ToShards.apply(input, axis)
    return copied


def sum_of_shards(partial: Tensor, axis: AxisInBlocks) -> Tensor:
    """Return the sum over the axis, in the dtype of the parts. Its gradient goes to every rank as it is."""
    total: Tensor = _SumOfShards.apply(partial, axis)
    return total


class _ToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, axis: AxisInBlocks) -> Tensor:
        ctx.axis = axis
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.sum(grad_output), None


class _SumOfShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: AxisInBlocks) -> Tensor:
        return axis.sum(partial)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None
