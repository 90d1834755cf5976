"""A tensor that ranks hold in pieces, as a leaf of a state dict: what a checkpoint needs to know to write and to find them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.mesh.cut import Cut


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


@dataclass(frozen=True, eq=False)
class SavedShards:
    """A tensor of a checkpoint that was saved as shards. read: gives one shard, by its number, in `shape`."""

    cut: Cut
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int], Tensor]

    def all(self) -> list[Tensor]:
        """Return every shard, in order."""
        return [self.read(shard) for shard in range(self.cut.num_shards)]
