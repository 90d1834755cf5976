"""Turns are shared out fairly over tenants."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from octet.service.errors import NotReady, TooManyRequests
from octet.service.jobs.admission import FairTurns
from tests.kit.waiting import LONG_S


class Holders:
    """Tasks that take a turn and hold it until they are let go."""

    def __init__(self, turns: FairTurns) -> None:
        self._turns = turns
        self.holding: list[str] = []
        self._let_go: dict[str, asyncio.Event] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, tenant: str, number: int) -> None:
        self.tasks += [asyncio.create_task(self._hold(tenant)) for _ in range(number)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def let_one_go(self, tenant: str) -> None:
        self._let_go.setdefault(tenant, asyncio.Event()).set()
        for _ in range(4):
            await asyncio.sleep(0)

    async def _hold(self, tenant: str) -> None:
        async with self._turns.turn(tenant, LONG_S):
            self.holding.append(tenant)
            while tenant not in self._let_go or not self._let_go[tenant].is_set():
                await asyncio.sleep(0)
            self._let_go.pop(tenant)
            self.holding.remove(tenant)


def run(steps: Coroutine[Any, Any, None]) -> None:
    async def all_of_it() -> None:
        await steps
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(all_of_it())


def test_many_requests_of_one_tenant_leave_turns_to_another() -> None:
    async def steps() -> None:
        holders = Holders(FairTurns(at_once=8, of_one=4, most_waiting=64))
        await holders.ask("greedy", 16)
        assert holders.holding == ["greedy"] * 4
        await holders.ask("modest", 4)
        assert holders.holding.count("modest") == 4

    run(steps())


def test_a_free_turn_goes_to_the_tenant_with_the_fewest() -> None:
    async def steps() -> None:
        holders = Holders(FairTurns(at_once=4, of_one=3, most_waiting=64))
        await holders.ask("greedy", 16)
        await holders.ask("second", 2)
        await holders.ask("third", 2)
        assert sorted(holders.holding) == ["greedy"] * 3 + ["second"]
        await holders.let_one_go("greedy")
        assert sorted(holders.holding) == ["greedy"] * 2 + ["second", "third"]

    run(steps())


def test_a_request_that_gets_no_turn_in_time_or_that_goes_away_leaves_nothing_behind() -> None:
    async def steps() -> None:
        turns = FairTurns(at_once=1, of_one=1, most_waiting=64)
        holders = Holders(turns)
        await holders.ask("greedy", 2)
        with pytest.raises(NotReady, match="no turn came in"):
            async with turns.turn("modest", 0.001):
                raise AssertionError("the turn is taken")
        holders.tasks[1].cancel()
        await holders.let_one_go("greedy")
        assert holders.holding == []
        async with turns.turn("modest", LONG_S):
            pass

    run(steps())


def test_a_turn_that_comes_as_its_request_goes_away_is_free_again() -> None:
    async def steps() -> None:
        turns = FairTurns(at_once=1, of_one=1, most_waiting=64)
        holders = Holders(turns)
        await holders.ask("first", 1)
        await holders.ask("second", 1)
        holders.tasks[0].cancel()
        holders.tasks[1].cancel()
        await asyncio.wait(holders.tasks)
        async with turns.turn("third", LONG_S):
            pass

    run(steps())


def test_one_tenant_has_so_many_requests_wait_and_no_more() -> None:
    async def steps() -> None:
        turns = FairTurns(at_once=1, of_one=1, most_waiting=2)
        holders = Holders(turns)
        await holders.ask("greedy", 3)
        with pytest.raises(TooManyRequests, match="tenant greedy") as refused:
            async with turns.turn("greedy", LONG_S):
                raise AssertionError("too many wait")
        assert refused.value.headers["Retry-After"] == "1"

    run(steps())
