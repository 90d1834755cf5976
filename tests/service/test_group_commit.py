"""Requests that share a transaction."""

import asyncio
import threading
from collections.abc import Sequence

from octet.service.db.group_commit import GroupCommit
from tests.kit.waiting import LONG_S


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


def test_requests_that_nobody_waits_for_are_gathered_until_they_are_drained() -> None:
    """An hour to gather ends at once when somebody wants all of them written, and begins again after that."""
    groups: list[list[int]] = []

    def write(requests: Sequence[int]) -> list[None]:
        groups.append(list(requests))
        return [None] * len(requests)

    commits = GroupCommit[int, None]("test", write, gather_s=3600)
    for first in (0, 10):
        written = [commits.submit(number) for number in range(first, first + 10)]
        assert not any(each.done() for each in written)
        commits.drain()
        assert all(each.done() for each in written)
    assert groups == [list(range(10)), list(range(10, 20))]


def test_each_request_gets_an_answer_or_an_error_of_its_own() -> None:
    def write(requests: Sequence[int]) -> list[int | Exception]:
        return [ValueError("odd") if request % 2 else request for request in requests]

    async def ask() -> list[int | BaseException]:
        commits = GroupCommit[int, int]("test", write)
        return await asyncio.gather(*[commits.submit_async(number) for number in (1, 2, 4)], return_exceptions=True)

    odd, *others = asyncio.run(ask())
    assert str(odd) == "odd"
    assert others == [2, 4]


def test_a_request_of_another_owner_is_in_the_next_transaction_however_many_wait() -> None:
    """Also where those that wait are so heavy that a transaction holds one of them; what has room then is taken in order."""
    groups: list[list[str]] = []
    begun, go_on = threading.Event(), threading.Event()

    def write(requests: Sequence[str]) -> list[None]:
        groups.append(list(requests))
        begun.set()
        go_on.wait(LONG_S)
        return [None] * len(requests)

    commits = GroupCommit[str, None](
        "test", write, max_weight=20, weigh=lambda request: 15 if request[0] == "A" else 1, owner=lambda request: request[0]
    )
    first = commits.submit("first")
    assert begun.wait(LONG_S)
    waiting = [commits.submit(request) for request in [*(f"A{number}" for number in range(9)), "b0", "b1", "c0"]]
    go_on.set()
    for each in (first, *waiting):
        each.result(LONG_S)
    assert groups[:3] == [["first"], ["A0", "b0", "b1", "c0", "A1"], ["A2", "A3"]]
    assert [request for group in groups for request in group if request[0] == "A"] == [f"A{number}" for number in range(9)]
