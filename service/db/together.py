"""Group commit: requests that arrive while one transaction is written share the next one, and its flush to disk.

A request is answered after its transaction is durable, as if it had one of its own.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeGuard, TypeVar

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as NoConnectionFree

KEPT_WAITING_S = 0.5
"""A transaction that fails after so long was kept waiting, for a lock or a connection."""

Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False)
class _Told(Generic[Answer]):
    """A function that an event loop calls with an answer, without a future for each."""

    loop: asyncio.AbstractEventLoop
    answered: Callable[[Answer | Exception], None]

    def settle(self, answer: Answer | Exception) -> None:
        try:
            self.answered(answer)
        except Exception as error:  # noqa: BLE001  the other requests of the transaction get their answers
            self.loop.call_exception_handler({"message": "an answer was not taken", "exception": error})


Waiter = Future[Answer] | asyncio.Future[Answer] | _Told[Answer]


class Together(Generic[Request, Answer]):
    """The requests of one kind in one process. One thread writes them.

    write: stores all requests in one transaction and returns an answer for each, in order. An answer that is an exception is
    raised for that request alone. If `write` raises, nothing may be stored, and each request is tried alone.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Sequence[Request]], Sequence[Answer | Exception]],
        *,
        max_weight: int = 64,
        weigh: Callable[[Request], int] = lambda _: 1,
    ) -> None:
        """name: of the thread. max_weight: of the requests of one transaction together, as `weigh` tells it."""
        self._write_all_of = write
        self._max_weight, self._weigh = max_weight, weigh
        self._waiting: list[tuple[Request, Waiter[Answer]]] = []
        self._lock = threading.Lock()
        self._is_writing = False
        self._writer = ThreadPoolExecutor(1, name)

    def add(self, request: Request) -> "Future[Answer]":
        """Store a request soon. The future raises what `write` raised or answered for it."""
        future: Future[Answer] = Future()
        if self._add(request, future):
            self._begin()
        return future

    def ask(self, request: Request) -> "asyncio.Future[Answer]":
        """Store a request soon, for the event loop that runs. The future raises as that of `add` does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._ask(loop, request, future)
        return future

    def tell(self, request: Request, answered: Callable[[Answer | Exception], None]) -> None:
        """Store a request soon, and let the event loop that runs call `answered` once, with what `ask` returns or raises."""
        loop = asyncio.get_running_loop()
        self._ask(loop, request, _Told(loop, answered))

    def _ask(self, loop: asyncio.AbstractEventLoop, request: Request, waiter: "Waiter[Answer]") -> None:
        if self._add(request, waiter):
            loop.call_soon(self._begin)  # requests that the loop has read in the same turn share the transaction

    def _add(self, request: Request, waiter: "Waiter[Answer]") -> bool:
        """Return True if the writer has to be woken."""
        with self._lock:
            self._waiting.append((request, waiter))
            was_writing, self._is_writing = self._is_writing, True
        return not was_writing

    def _begin(self) -> None:
        self._writer.submit(self._write_until_none_waits)

    def _write_until_none_waits(self) -> None:
        while taken := self._take():
            together = [one for one in taken if _is_wanted(one[1])]
            began_s = time.monotonic()
            answers = self._write([request for request, _ in together]) if together else []
            _settle_all([(future, answer) for (_, future), answer in zip(together, answers, strict=True)])
            if answers and _is_of_the_database(answers[-1]) and time.monotonic() - began_s >= KEPT_WAITING_S:
                self._refuse_all(answers[-1])

    def _refuse_all(self, error: Exception) -> None:
        """Give all who wait the error of a database that kept a transaction waiting, so that nobody waits for a second one."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        _settle_all([(future, error) for _, future in waiting if _is_wanted(future)])

    def _take(self) -> "list[tuple[Request, Waiter[Answer]]]":
        """Take the requests of the next transaction, at least one. Returns none, and ends the turn, if none waits."""
        with self._lock:
            number, weight = 0, 0
            while number < len(self._waiting) and (number == 0 or weight < self._max_weight):
                weight += self._weigh(self._waiting[number][0])
                number += 1
            taken, self._waiting = self._waiting[:number], self._waiting[number:]
            self._is_writing = bool(taken)
            return taken

    def _write(self, requests: Sequence[Request]) -> "Sequence[Answer | Exception]":
        try:
            return self._write_all_of(requests)
        except Exception as error:  # noqa: BLE001  the requests get it
            if len(requests) == 1 or _is_of_the_database(error):
                return [error] * len(requests)
            # One request is the reason. Nothing was stored, so each is tried alone.
            return [answer for one in requests for answer in self._write([one])]


def _is_wanted(waiter: "Waiter[Answer]") -> bool:
    """Return False if the request was cancelled while it waited."""
    if isinstance(waiter, _Told):
        return True
    return not waiter.cancelled() if isinstance(waiter, asyncio.Future) else waiter.set_running_or_notify_cancel()


def _settle_all(settled: "Sequence[tuple[Waiter[Answer], Answer | Exception]]") -> None:
    """Give each its answer. An event loop is woken once for all of its own: each time costs a system call."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[Waiter[Answer], Answer | Exception]]] = {}
    for waiter, answer in settled:
        by_loop.setdefault(_loop_of(waiter), []).append((waiter, answer))
    _settle(by_loop.pop(None, ()))
    for loop, of_loop in by_loop.items():
        assert loop is not None, "those without a loop are settled"
        try:
            loop.call_soon_threadsafe(_settle, of_loop)
        except RuntimeError:
            if not loop.is_closed():  # nobody waits in a closed one
                raise


def _loop_of(waiter: "Waiter[Answer]") -> asyncio.AbstractEventLoop | None:
    if isinstance(waiter, _Told):
        return waiter.loop
    return waiter.get_loop() if isinstance(waiter, asyncio.Future) else None


def _settle(settled: "Iterable[tuple[Waiter[Answer], Answer | Exception]]") -> None:
    for waiter, answer in settled:
        if isinstance(waiter, _Told):
            waiter.settle(answer)
        elif waiter.cancelled():
            continue
        elif isinstance(answer, Exception):
            waiter.set_exception(answer)
        else:
            waiter.set_result(answer)


def _is_of_the_database(answer: object) -> TypeGuard[Exception]:
    """Return True for the error of a database that is locked or went away, whatever the requests are.

    It may have committed, so a second try could store a request twice; and each try may wait as long as the first.
    """
    return isinstance(answer, DBAPIError | NoConnectionFree) and not isinstance(answer, IntegrityError | DataError)
