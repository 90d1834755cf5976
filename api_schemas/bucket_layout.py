"""The cut of a bucket of parameters into equal shares, one for each rank. Numbers only: no tensors, no communication.

The parameters stand one after another in a flat buffer, each starting at a multiple of 128 elements; the buffer is padded so
that shares are multiples of 128, too. So every cut falls on a multiple of 128 elements of a flattened parameter: it never
divides a block that shares a scale, nor the elements that share one draw of random numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 128
"""Elements; the block of the optimizer's codecs. With 16, blocks are cut and codes differ."""
MAX_ELEMENTS = 16 * 1024 * 1024
"""Elements of one bucket. At most three buckets are under way; each holds two copies of its gradients, sent and received."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements of one parameter that one rank owns.

    index: that of the parameter in the bucket. first: the piece's first element in the flattened
    parameter. start: the piece's first element in the rank's share.
    """

    index: int
    first: int
    length: int
    start: int

    @property
    def elements(self) -> range:
        """The piece's elements in the flattened parameter."""
        return range(self.first, self.first + self.length)

    @property
    def in_share(self) -> slice:
        """The piece's elements in the rank's share."""
        return slice(self.start, self.start + self.length)


@dataclass(frozen=True)
class BucketLayout:
    """The places of parameters with `sizes` elements in a buffer of `num_ranks` equal shares."""

    sizes: tuple[int, ...]
    num_ranks: int

    @property
    def offsets(self) -> list[int]:
        """The first element of each parameter in the buffer."""
        return list(accumulate(map(_aligned, self.sizes), initial=0))[:-1]

    @property
    def share_size(self) -> int:
        """Elements of one rank's share."""
        return _aligned(-(-sum(map(_aligned, self.sizes)) // self.num_ranks))

    def pieces(self, rank: int) -> list[Piece]:
        """The pieces that a rank owns, in the order of the parameters; at most one of each, none of them empty."""
        share, found = range(rank * self.share_size, (rank + 1) * self.share_size), []
        for index, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            start, stop = max(offset, share.start), min(offset + size, share.stop)
            if start < stop:
                found.append(Piece(index, start - offset, stop - start, start - share.start))
        return found


def fill_buckets(sizes: Sequence[int], max_elements: int) -> list[range]:
    """Divide consecutive parameters into buckets of at most `max_elements`; a larger parameter has a bucket to itself."""
    buckets, first, num_elements = [], 0, 0
    for index, size in enumerate(sizes):
        if index > first and num_elements + size > max_elements:
            buckets.append(range(first, index))
            first, num_elements = index, 0
        num_elements += size
    return [*buckets, range(first, len(sizes))] if sizes else []


def _aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT
