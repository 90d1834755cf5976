"""The ranks' pieces of one parameter's tensors: put together, or described for a checkpoint. An entry may be of a block."""

import torch
from torch import Tensor

from worker.mesh import TensorInPieces
from worker.parallel.buckets import Bucket


def join(bucket: Bucket, index: int, own: Tensor, elements_per_entry: int) -> Tensor:
    """Put the ranks' pieces of a tensor together: the entries, 1-D, of one parameter of the bucket. A collective."""
    lengths = [length for _, length in _places(bucket, index, elements_per_entry)]
    padded = own.new_zeros(max(lengths))
    padded[: own.numel()] = own
    return torch.cat([share[:length] for share, length in zip(bucket.axis.start_gather(padded).wait(), lengths, strict=True)])


def in_pieces(
    bucket: Bucket, index: int, own: Tensor, elements_per_entry: int, shape: tuple[int, ...] | None = None
) -> TensorInPieces:
    """Describe this rank's piece of a tensor of one parameter of the bucket. shape: of the whole; by default 1-D."""
    places = _places(bucket, index, elements_per_entry)
    num_entries = sum(length for _, length in places)
    return TensorInPieces(own.detach(), (num_entries,) if shape is None else shape, tuple(places))


def _places(bucket: Bucket, index: int, elements_per_entry: int) -> list[tuple[int, int]]:
    """The first entry of each rank's piece, and its number of entries."""
    places = []
    for rank in range(bucket.axis.size):
        held = next((piece.elements for piece in bucket.layout.pieces(rank) if piece.index == index), range(0))
        first = held.start // elements_per_entry
        places.append((first, -(-held.stop // elements_per_entry) - first))
    return places
