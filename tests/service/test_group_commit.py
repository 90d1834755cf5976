"""Requests that share a transaction."""

import asyncio
from collections.abc import Sequence

from octet.service.db.group_commit import GroupCommit


def test_requests_of_one_turn_of_the_loop_share_a_transaction() -> None:
    """Each would have one nearly by itself if the first woke the writer at once."""
    groups: list[list[int]] = []

    def write(requests: Sequence[int]) -> list[int]:
        groups.append(list(requests))
        return [10 * request for request in requests]

    async def ask_in_one_turn(commits: GroupCommit[int, int]) -> list[int]:
        return await asyncio.gather(*[commits.submit_async(number) for number in range(50)])

    commits = GroupCommit("test", write)
    assert asyncio.run(ask_in_one_turn(commits)) == [10 * number for number in range(50)]
    assert groups == [list(range(50))]


def test_each_request_gets_an_answer_or_an_error_of_its_own() -> None:
    def write(requests: Sequence[int]) -> list[int | Exception]:
        return [ValueError("odd") if request % 2 else request for request in requests]

    async def ask() -> list[int | BaseException]:
        commits = GroupCommit[int, int]("test", write)
        return await asyncio.gather(*[commits.submit_async(number) for number in (1, 2, 4)], return_exceptions=True)

    odd, *others = asyncio.run(ask())
    assert str(odd) == "odd"
    assert others == [2, 4]
