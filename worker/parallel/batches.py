"""The batch of one step of somebody's own loop: its check, its division into micro-batches, and the weight of each."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from octet.worker.mesh import Axis
from octet.worker.models.model import TrainedModel

Inputs = Tensor | Mapping[str, Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]
"""The mean loss () of a model's output and targets."""
MicroBatch = tuple[Inputs, Tensor | None]
"""Inputs and targets; the batch of a language model of ours has its targets among the inputs."""


def check_batch(model: nn.Module, inputs: Inputs, targets: Tensor | None, loss_fn: LossFunction | None) -> int:
    """Return the number of samples, which all tensors have. Raises ValueError for a batch that a step cannot compute."""
    if (loss_fn is None) != (targets is None):
        raise ValueError(
            f"got {'targets without loss_fn' if loss_fn is None else 'loss_fn without targets'}; allowed: both, or neither "
            "with a batch of a language model of ours, which computes its own loss. Pass both."
        )
    if loss_fn is None and not (isinstance(model, TrainedModel) and isinstance(inputs, Mapping)):
        raise ValueError(
            f"got a {type(inputs).__name__} for a {type(model).__name__} without loss_fn; allowed: a batch of tensors by name "
            "for a language model of ours, which computes its own loss. Pass targets and loss_fn."
        )
    if isinstance(inputs, Mapping) and not isinstance(model, TrainedModel):
        raise ValueError(f"inputs is a {type(inputs).__name__}; allowed for a {type(model).__name__}: one tensor. Pass one.")
    named = {"inputs": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    named |= {} if targets is None else {"targets of loss_fn": targets}
    sizes = {name: tensor.shape[0] if tensor.dim() else 0 for name, tensor in named.items()}
    if len(set(sizes.values())) != 1:
        got = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"tensors of the batch have different numbers of samples: {got}; allowed: one. Change the batch.")
    return next(iter(sizes.values()))


def micro_batches_of(inputs: Inputs, targets: Tensor | None, size: int, number: int) -> list[MicroBatch]:
    """Divide a batch of `size` samples. Raises ValueError if it has no such number of micro-batches of one size."""
    if not size or size % number:
        raise ValueError(
            f"the batch has {size} samples and micro_batches is {number}; allowed: multiples of {number}, since all "
            "micro-batches have one size. Leave out the last batch of an epoch (drop_last=True), or change micro_batches."
        )
    own_targets = [None] * number if targets is None else targets.chunk(number)
    if isinstance(inputs, Tensor):
        return list(zip(inputs.chunk(number), own_targets, strict=True))
    parts = {name: tensor.chunk(number) for name, tensor in inputs.items()}
    return [({name: part[index] for name, part in parts.items()}, own_targets[index]) for index in range(number)]


def loss_divisors(batches: list[MicroBatch], loss_fn: LossFunction | None, data: Axis) -> list[float]:
    """Return each micro-batch's divisor of its mean loss, so that the data ranks' mean of their sums is the mean loss."""
    counts = [batch["num_targets"].sum() for batch, _ in batches if isinstance(batch, Mapping) and "num_targets" in batch]
    if loss_fn is not None or not counts:
        return [float(len(batches))] * len(batches)
    numbers = torch.stack(counts).tolist()
    (total,) = data.sum(float(sum(numbers)))
    return [total / (number * data.size) if number else math.inf for number in numbers]
