"""Which rank has skipped a block at ZeRO stage 3, where all ranks gather the same blocks in the same order. Pure, no torch.

A rank that skips one gathers the next while the others gather the skipped one. The backends match collectives by their number
alone, so both may go on for a while; the rank that waits at last is one that has run every block, and not the one at fault.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Skip(NamedTuple):
    """Ranks that have skipped a block, by its index in the model, and the others that have run it."""

    ranks: tuple[int, ...]
    block: int
    others: tuple[int, ...]


def find_skip(gathered: Mapping[int, tuple[int, tuple[int, ...]]]) -> Skip | None:
    """Return the first block that some ranks have gathered and others left out; None if that cannot be told.

    gathered: for each rank the number of blocks that it has gathered so far, and the newest of them in order. Where ranks part,
    a rank has skipped what another gathers there if it goes on as that one does some blocks later. If each goes on as the other
    does, or none, they run blocks in different orders, and nobody is named.
    """
    first = max((count - len(blocks) for count, blocks in gathered.values()), default=0)
    orders = {rank: blocks[first - (count - len(blocks)) :] for rank, (count, blocks) in gathered.items()}
    for number in range(min(map(len, orders.values()), default=0)):  # a rank that has fewer may only be behind
        rests = {rank: order[number:] for rank, order in orders.items()}
        here = {rest[0] for rest in rests.values()}
        if len(here) > 1:
            skips = [skip for block in sorted(here) if (skip := _skip_of(block, rests))]
            return skips[0] if len(skips) == 1 else None
    return None


def _skip_of(block: int, rests: Mapping[int, tuple[int, ...]]) -> Skip | None:
    """The skip of a block with which the rests of some ranks begin."""
    others = tuple(sorted(rank for rank, rest in rests.items() if rest[:1] == (block,)))
    whole = rests[others[0]]
    ranks = tuple(
        sorted(
            rank
            for rank, rest in rests.items()
            if rank not in others and _num_alike_later(whole, rest) > _num_alike_later(rest, whole)
        )
    )
    return Skip(ranks, block, others) if ranks else None


def _num_alike_later(whole: tuple[int, ...], part: tuple[int, ...]) -> int:
    """How many blocks from the begin of `part` on follow each other in `whole`, anywhere but at its begin."""
    return max((_num_alike(whole[start:], part) for start in range(1, len(whole))), default=0)


def _num_alike(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """The length of the common beginning."""
    return next(
        (index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), min(len(left), len(right))
    )
