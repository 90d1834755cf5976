"""Threads for checks that read files: a few, which share what waits.

To wake a thread for each check and the event loop for each result takes more CPU time than the check of a usual job. So one
thread takes all checks that wait, one after another, requests for the same check share it, and the event loop is woken once
for the results that are ready. A file system can be slow: as soon as no check was begun for `SLOW_S` while some wait, another
thread helps.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

SLOW_S = 0.01


class Overdue(Exception):
    """No thread came to a check in time."""


@dataclass
class _Check:
    """A check that no thread has begun, and the requests that wait for it."""

    act: Callable[[], None]
    waiting: "list[asyncio.Future[None]]" = field(default_factory=list)


@dataclass
class _Request:
    """One request's wait for a check."""

    key: Hashable
    done: "asyncio.Future[None]"
    longest_wait_s: float
    ends_at_s: float
    num_begun: int
    """Checks that threads had begun when this request last looked."""
    timer: asyncio.TimerHandle | None = None


class CheckThreads:
    """Runs checks in at most `num_threads` threads."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "octet-checks")
        self._lock = threading.Lock()
        self._checks: dict[Hashable, _Check] = {}  # in the order in which they came
        self._num_working = 0
        self._num_begun = 0
        self._results: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[None], Exception | None]]] = {}

    async def run(self, key: Hashable, act: Callable[[], None], longest_wait_s: float) -> None:
        """Run a check, or wait for one with the same key that has not begun. Raises what it raises.

        Raises Overdue if all threads were at work for `longest_wait_s` seconds and none began it.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._checks.setdefault(key, _Check(act)).waiting.append(done)
            is_first = self._num_working == 0
            self._num_working += is_first
            request = _Request(key, done, longest_wait_s, time.monotonic() + longest_wait_s, self._num_begun)
        if is_first:
            self._threads.submit(self._work)
        request.timer = loop.call_later(min(SLOW_S, longest_wait_s), self._look_after, request)
        try:
            await done
        finally:
            request.timer.cancel()

    def _look_after(self, request: _Request) -> None:
        """Have another thread help if no check was begun since the last look. End the wait that has been too long."""
        now_s = time.monotonic()
        with self._lock:
            check = self._checks.get(request.key)
            if check is None or request.done not in check.waiting:
                return
            is_late, has_free_threads = now_s >= request.ends_at_s, self._num_working < self._num_threads
            helps = has_free_threads and (is_late or self._num_begun == request.num_begun)
            self._num_working += helps
            request.num_begun = self._num_begun
            if is_late and not helps:
                check.waiting.remove(request.done)
                if not check.waiting:
                    del self._checks[request.key]
        if helps:
            self._threads.submit(self._work)
            request.ends_at_s = now_s + request.longest_wait_s
        elif is_late:
            if not request.done.done():
                request.done.set_exception(Overdue())
            return
        # With all threads at work there is nothing left to do for this request but to end its wait.
        left_s = max(0.0, request.ends_at_s - now_s)
        next_s = min(left_s, SLOW_S) if has_free_threads else left_s
        request.timer = request.done.get_loop().call_later(next_s, self._look_after, request)

    def _work(self) -> None:
        while check := self._take():
            try:
                check.act()
            except Exception as error:  # noqa: BLE001  the requests get it
                self._settle(check.waiting, error)
            else:
                self._settle(check.waiting, None)

    def _take(self) -> _Check | None:
        """Take the oldest check. Returns None, and ends the thread's turn, if none waits."""
        with self._lock:
            if not self._checks:
                self._num_working -= 1
                return None
            self._num_begun += 1
            return self._checks.pop(next(iter(self._checks)))

    def _settle(self, futures: "list[asyncio.Future[None]]", error: Exception | None) -> None:
        """Give requests their result. An event loop is woken unless it has yet to fetch other results."""
        woken = []
        with self._lock:
            for future in futures:
                results = self._results.setdefault(future.get_loop(), [])
                if not results:
                    woken.append(future.get_loop())
                results.append((future, error))
        for loop in woken:
            try:
                loop.call_soon_threadsafe(self._give, loop)
            except RuntimeError:
                if not loop.is_closed():
                    raise
                with self._lock:  # nobody waits in a closed one
                    del self._results[loop]

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            results = self._results.pop(loop)
        for future, error in results:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
