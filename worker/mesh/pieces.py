"""A tensor that ranks hold in pieces, as a leaf of a state dict: what a checkpoint needs to know to write and to find them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class TensorInPieces:
    """own: this rank's consecutive entries of the flattened tensor, 1-D, maybe none. shape: of the whole tensor.

    places: of each rank's piece, by rank: its first entry, and how many it has. Together the pieces are the whole.
    """

    own: Tensor
    shape: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
