"""Requests that share a transaction."""

import asyncio
from collections.abc import Sequence

from service.db.together import Together


def test_requests_of_one_turn_of_the_loop_share_a_transaction() -> None:
    """Each would have one nearly by itself if the first woke the writer at once."""
    groups: list[list[int]] = []

    def write(requests: Sequence[int]) -> list[int]:
        groups.append(list(requests))
        return [10 * request for request in requests]

    async def ask_in_one_turn(together: Together[int, int]) -> list[int]:
        return await asyncio.gather(*[together.ask(number) for number in range(50)])

    together = Together("test", write)
    assert asyncio.run(ask_in_one_turn(together)) == [10 * number for number in range(50)]
    assert groups == [list(range(50))]
