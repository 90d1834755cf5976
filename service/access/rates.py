"""Limit the requests of each principal by what they cost, with a token bucket for each."""

import time
from collections.abc import Callable

from octet.service.access.principal import Principal
from octet.service.errors import TooManyRequests

BURST_S = 2.0
"""A principal that was idle may send so many seconds' worth at once."""
FREE_BODY_BYTES = 4 << 10
COST_OF_KIB = 1.0
"""The cost of a body's further KiB. Parsing 64 KiB of wrong fields takes 10 ms, as long as some dozens of small requests."""
COST_OF_VIOLATION = 0.3
"""The cost of explaining one of the violations of a body, which takes 0.1 ms."""
COST_OF_LIST = 5.0
MOST_COST = 64.0
"""No request costs more, so whoever waits long enough may send any."""


class Rates:
    """The buckets of one process. They are filled by time alone, so an idle principal costs nothing."""

    def __init__(self, per_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        """per_s: the cost that a principal may cause each second; 0 for no limit."""
        self._per_s, self._clock_s = per_s, clock_s
        self._most = max(MOST_COST, BURST_S * per_s)
        self._left: dict[tuple[str, str], tuple[float, float]] = {}
        """The rest in each bucket, and the moment when that was counted, by tenant and name of a principal."""

    def charge(self, principal: Principal, cost: float) -> None:
        """Take the cost of a request from its principal's bucket. Raises TooManyRequests if there is not enough in it."""
        if not self._per_s:
            return
        key, now_s = (principal.tenant, principal.name), self._clock_s()
        left, counted_at_s = self._left.get(key, (self._most, now_s))
        left = min(self._most, left + (now_s - counted_at_s) * self._per_s)
        if left < cost:
            self._left[key] = left, now_s
            message = (
                f"{principal.name} sends more than {self._per_s:g} requests a second (OCTET_REQUESTS_PER_S); send it later"
            )
            raise TooManyRequests(message, (cost - left) / self._per_s)
        self._left[key] = left - cost, now_s


def cost_of(num_body_bytes: int, *, is_list: bool) -> float:
    """Return the cost of a request: 1 for a small one."""
    cost = COST_OF_LIST if is_list else 1.0
    return min(MOST_COST, cost + COST_OF_KIB * max(0, num_body_bytes - FREE_BODY_BYTES) / 1024)
