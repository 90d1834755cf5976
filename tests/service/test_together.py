"""Requests that share a transaction."""

import asyncio
from collections.abc import Sequence
from typing import Any

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


def test_who_is_told_gets_an_answer_or_an_error_once() -> None:
    """One that fails to take its answer keeps no other from its own."""
    told: list[int | Exception] = []
    failed: list[dict[str, Any]] = []

    def write(requests: Sequence[int]) -> list[int | Exception]:
        return [ValueError("odd") if request % 2 else request for request in requests]

    def fail(_: int | Exception) -> None:
        raise RuntimeError("not taken")

    async def tell() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        together = Together[int, int]("test", write)
        for number, answered in ((1, told.append), (2, fail), (4, told.append)):
            together.tell(number, answered)
        assert await together.ask(6) == 6  # it is answered after those before it

    asyncio.run(tell())
    assert [str(answer) for answer in told] == ["odd", "4"]
    assert [str(context["exception"]) for context in failed] == ["not taken"]
