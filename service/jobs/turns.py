"""Turns at something that few may do at once, shared out fairly over tenants."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from octet.service.errors import NotReady, TooManyRequests


class FairTurns:
    """The turns of one event loop.

    A free turn goes to the tenant that has the fewest, and among those to the one that waits since the longest-past turn.
    One tenant never has all turns, so another one's first request need not wait for the end of any.
    """

    def __init__(self, at_once: int, of_one: int, most_waiting: int) -> None:
        """of_one: the most turns of one tenant. most_waiting: the most of its requests that wait for one."""
        self._at_once, self._of_one, self._most_waiting = at_once, of_one, most_waiting
        self._taken = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Requests that wait, by tenant; the tenant whose turn is longest past comes first."""

    @asynccontextmanager
    async def turn(self, tenant: str, longest_wait_s: float) -> AsyncIterator[None]:
        """Hold a turn. Raises NotReady if none comes in time, and TooManyRequests if too many requests of the tenant wait."""
        await self._take(tenant, longest_wait_s)
        try:
            yield
        finally:
            self._give_back(tenant)

    async def _take(self, tenant: str, longest_wait_s: float) -> None:
        waiting = self._waiting.setdefault(tenant, deque())
        if len(waiting) >= self._most_waiting:
            message = f"{len(waiting)} jobs of tenant {tenant} wait for the check of their files, as many as may; send it again"
            raise TooManyRequests(message, 1.0)
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        self._share_out()
        try:
            async with asyncio.timeout(longest_wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it came in the same moment
                self._give_back(tenant)
            else:
                waiting.remove(turn)
                self._forget_if_idle(tenant)
            if isinstance(error, TimeoutError):
                num_taken = self._taken.total()
                message = f"{num_taken} jobs are being checked and no turn came in {longest_wait_s:g} s; try again"
                raise NotReady(message) from None
            raise

    def _give_back(self, tenant: str) -> None:
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._share_out()

    def _share_out(self) -> None:
        while self._taken.total() < self._at_once:
            able = [tenant for tenant in self._waiting if self._taken[tenant] < self._of_one]
            if not able:
                return
            tenant = min(able, key=self._taken.__getitem__)
            turns = self._waiting.pop(tenant)
            turns.popleft().set_result(None)
            self._taken[tenant] += 1
            if turns:
                self._waiting[tenant] = turns  # behind all others

    def _forget_if_idle(self, tenant: str) -> None:
        if not self._waiting.get(tenant, True):
            del self._waiting[tenant]
