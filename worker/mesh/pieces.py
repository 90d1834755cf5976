"""Tensors that ranks hold in parts: equal shards along a dimension (tensor axis), and pieces of the flattened tensor (ZeRO)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octet.worker.common.deferred import deferred, is_deferred


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


@dataclass(frozen=True, eq=False)
class TensorInPieces:
    """own: this rank's consecutive entries of the flattened tensor, 1-D, maybe none. shape: of the whole tensor.

    places: of each rank's piece, by rank: its first entry, and how many it has. Together the pieces are the whole.
    stride, first_rank: the i-th place is that of rank first_rank + i · stride of the world. cut: the tensor is a shard; `shape`
    and `places` are of each shard, and shard s is held by ranks s further.
    """

    own: Tensor
    shape: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    stride: int = 1
    cut: Cut | None = None
    first_rank: int = 0

    @property
    def ranked_places(self) -> list[tuple[int, int, int, int]]:
        """The rank in the world, the number of the shard, the first entry and the number of entries of each piece."""
        return [
            (self.first_rank + index * self.stride + shard, shard, first, length)
            for shard in range(1 if self.cut is None else self.cut.num_shards)
            for index, (first, length) in enumerate(self.places)
            if length
        ]
