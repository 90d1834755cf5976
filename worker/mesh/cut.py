"""How a tensor is divided into equal shards along one dimension, one for each rank of the tensor axis."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.deferred import deferred, is_deferred


@dataclass(frozen=True, slots=True)
class Cut:
    """A division of a whole tensor along `dim` into `num_shards` equal shards.

    groups: parts of the dimension that are each divided, as the queries, keys and values that one matrix holds one after
    another: a shard then has its part of each. shape: of one shard.
    """

    dim: int
    groups: int
    num_shards: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, whole: Tensor, dim: int, groups: int, num_shards: int) -> "Cut":
        """The cut of a tensor. Raises ValueError if the dimension cannot be divided."""
        if whole.shape[dim] % (groups * num_shards):
            raise ValueError(
                f"dimension {dim} of a tensor of shape {tuple(whole.shape)} cannot be divided among {num_shards} ranks; "
                f"allowed: multiples of {groups * num_shards}. Change the size or the tensor degree."
            )
        shape = list(whole.shape)
        shape[dim] //= num_shards
        return cls(dim, groups, num_shards, tuple(shape))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return (*self.shape[: self.dim], self.shape[self.dim] * self.num_shards, *self.shape[self.dim + 1 :])

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        """Return a contiguous copy of a rank's shard; of a tensor without memory, one without."""
        if is_deferred(whole):
            return deferred(self.shape, whole.dtype, whole.device)
        return self.part(whole, rank).clone(memory_format=torch.contiguous_format)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's shard, as a view where strides allow it."""
        parts = whole.unflatten(self.dim, (self.groups, self.num_shards, -1)).select(self.dim + 1, rank)
        return parts.flatten(self.dim, self.dim + 1)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Put all ranks' shards together; each may also be flat."""
        parts = [shard.view(self.shape).unflatten(self.dim, (self.groups, -1)) for shard in shards]
        return torch.stack(parts, self.dim + 1).flatten(self.dim, self.dim + 2)
