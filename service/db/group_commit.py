"""Group commit: requests that arrive while one transaction is written share the next one, and its flush to disk.

A request is answered after its transaction is durable, as if it had one of its own.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeGuard, TypeVar

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as NoConnectionFree

KEPT_WAITING_S = 0.5
"""A transaction that fails after so long was kept waiting, for a lock or a connection."""

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Waiter = Future[Answer] | asyncio.Future[Answer]


class GroupCommit(Generic[Request, Answer]):
    """Writes the requests of one kind in one process, with one thread.

    write: stores all requests in one transaction and returns an answer for each, in order. An
    answer that is an exception is raised for that request alone. If `write` raises, nothing may
    be stored, and each request is tried alone.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Sequence[Request]], Sequence[Answer | Exception]],
        *,
        max_weight: int = 64,
        weigh: Callable[[Request], int] = lambda _: 1,
        owner: Callable[[Request], Hashable] = lambda _: None,
        gather_s: float = 0.0,
    ) -> None:
        """name: of the thread. max_weight: the most that `weigh` finds for one transaction.

        owner: of a request. Where several wait, one owner's requests have no more than a quarter of a transaction before
        the others have theirs, so however many one sends, those of another are in the next transaction.
        gather_s: the time in which a transaction gathers requests before it begins, for those that nobody waits for.
        """
        self._write_all_of = write
        self._max_weight, self._weigh, self._owner = max_weight, weigh, owner
        self._gather_s, self._is_urgent = gather_s, threading.Event()
        self._waiting: list[tuple[Request, Waiter[Answer]]] = []
        self._lock = threading.Lock()
        self._is_writing = False
        self._writer = ThreadPoolExecutor(1, name)

    def submit(self, request: Request) -> "Future[Answer]":
        """Store a request soon. The future raises what `write` raised or answered for it."""
        future: Future[Answer] = Future()
        if self._add(request, future):
            self._begin()
        return future

    def submit_async(self, request: Request) -> "asyncio.Future[Answer]":
        """Do the same as `submit`, with a future of the event loop that runs."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        if self._add(request, future):
            # Requests that the loop has read in the same turn share the transaction.
            loop.call_soon(self._begin)
        return future

    def drain(self) -> None:
        """Wait until what `submit` was given before is written, or has failed. Nothing is gathered any longer meanwhile."""
        self._is_urgent.set()
        self._writer.submit(self._is_urgent.clear).result()

    def _add(self, request: Request, waiter: "Waiter[Answer]") -> bool:
        """Return True if the writer has to be woken."""
        with self._lock:
            self._waiting.append((request, waiter))
            was_writing, self._is_writing = self._is_writing, True
        return not was_writing

    def _begin(self) -> None:
        self._writer.submit(self._write_until_none_waits)

    def _write_until_none_waits(self) -> None:
        while taken := self._gather():
            wanted = [one for one in taken if _is_wanted(one[1])]
            began_s = time.monotonic()
            answers = self._write([request for request, _ in wanted]) if wanted else []
            _settle_all([(waiter, answer) for (_, waiter), answer in zip(wanted, answers, strict=True)])
            if answers and _is_of_the_database(answers[-1]) and time.monotonic() - began_s >= KEPT_WAITING_S:
                self._refuse_all(answers[-1])

    def _refuse_all(self, error: Exception) -> None:
        """Fail all requests that wait with the database's error, so that nobody waits for a second one."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        _settle_all([(waiter, error) for _, waiter in waiting if _is_wanted(waiter)])

    def _gather(self) -> "list[tuple[Request, Waiter[Answer]]]":
        if self._gather_s and self._waiting:
            self._is_urgent.wait(self._gather_s)
        return self._take()

    def _take(self) -> "list[tuple[Request, Waiter[Answer]]]":
        """Take the requests of the next transaction, at least one. Without any, end the writer's turn."""
        with self._lock:
            chosen = self._choose() if len(self._waiting) > 1 else range(len(self._waiting))
            taken = [self._waiting[number] for number in chosen]
            self._waiting = [one for number, one in enumerate(self._waiting) if number not in chosen]
            self._is_writing = bool(taken)
            return taken

    def _choose(self) -> dict[int, None]:
        """Choose the requests of the next transaction, by their numbers: each owner's share first, then what has room."""
        chosen: dict[int, None] = {}
        weight, weight_of = 0, Counter[Hashable]()
        for most_of_one in (self._max_weight / 4, self._max_weight):
            for number, (request, _) in enumerate(self._waiting):
                if chosen and weight >= self._max_weight:
                    return chosen
                owner = self._owner(request)
                if number not in chosen and weight_of[owner] < most_of_one:
                    chosen[number] = None
                    added = self._weigh(request)
                    weight += added
                    weight_of[owner] += added
        return chosen

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
    return not waiter.cancelled() if isinstance(waiter, asyncio.Future) else waiter.set_running_or_notify_cancel()


def _settle_all(settled: "Sequence[tuple[Waiter[Answer], Answer | Exception]]") -> None:
    """Settle each waiter. An event loop is woken once for all of its own: each time costs a system call."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[Waiter[Answer], Answer | Exception]]] = {}
    for waiter, answer in settled:
        loop = waiter.get_loop() if isinstance(waiter, asyncio.Future) else None
        by_loop.setdefault(loop, []).append((waiter, answer))
    _settle(by_loop.pop(None, ()))
    for loop, of_loop in by_loop.items():
        assert loop is not None, "those without a loop are settled"
        try:
            loop.call_soon_threadsafe(_settle, of_loop)
        except RuntimeError:
            if not loop.is_closed():  # nobody waits in a closed one
                raise


def _settle(settled: "Iterable[tuple[Waiter[Answer], Answer | Exception]]") -> None:
    for waiter, answer in settled:
        if waiter.cancelled():
            continue
        if isinstance(answer, Exception):
            waiter.set_exception(answer)
        else:
            waiter.set_result(answer)


def _is_of_the_database(answer: object) -> TypeGuard[Exception]:
    """Return True for the error of a database that is locked or went away, whatever the requests are.

    It may have committed, so a second try could store a request twice; and each try may wait as
    long as the first.
    """
    return isinstance(answer, DBAPIError | NoConnectionFree) and not isinstance(answer, IntegrityError | DataError)
