"""Stores submissions together: those that arrive while one transaction is written share the next one, and its flush to disk.

A submission is answered after its transaction is durable, as if it had one of its own.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from api_schemas import Job
from service.db.engine import Database
from service.jobs import commands
from service.jobs.requests import Request, Submission

MAX_TOGETHER = 64

Show = Callable[[Session, Sequence[tuple[Request, Submission]]], list[Job]]
"""Shows the submitted jobs, in the transaction that stores them."""


@dataclass(frozen=True)
class Stored:
    """A job as the answer shows it. `replayed` is true if an earlier submission with the same idempotency key stored it."""

    job: Job
    replayed: bool


@dataclass
class Submissions:
    """The submissions of one process. One thread writes them."""

    database: Database
    show: Show
    _waiting: list[tuple[Request, "Future[Stored]"]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_writing: bool = False
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "octet-submissions"))

    def add(self, request: Request) -> "Future[Stored]":
        """Store a job soon. The future raises IdempotencyMismatch, and the database's errors."""
        future: Future[Stored] = Future()
        with self._lock:
            self._waiting.append((request, future))
            if self._is_writing:
                return future
            self._is_writing = True
        self._writer.submit(self._write_all)
        return future

    def _write_all(self) -> None:
        while True:
            with self._lock:
                taken, self._waiting = self._waiting[:MAX_TOGETHER], self._waiting[MAX_TOGETHER:]
                if not taken:
                    self._is_writing = False
                    return
            together = [one for one in taken if one[1].set_running_or_notify_cancel()]
            answers = self._write(together)
            for (_, future), answer in zip(together, answers, strict=True):
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _write(self, together: "list[tuple[Request, Future[Stored]]]") -> "list[Stored | Exception]":
        requests = [request for request, _ in together]
        try:
            with self.database.write() as session:
                results = commands.submit_all(session, requests, self.database.now(session))
                pairs = zip(requests, results, strict=True)
                stored = [(request, result) for request, result in pairs if isinstance(result, Submission)]
                shown = iter(self.show(session, stored))
        except Exception as error:  # noqa: BLE001  the submissions get it
            if len(together) == 1 or _may_be_stored(error):
                return [error] * len(together)
            # One submission is the reason. Nothing was stored, so each is tried alone.
            return [answer for one in together for answer in self._write([one])]
        return [Stored(next(shown), result.replayed) if isinstance(result, Submission) else result for result in results]


def _may_be_stored(error: Exception) -> bool:
    """Return True for a database that went away: it may have committed, and a second try could store a job twice."""
    return isinstance(error, DBAPIError) and not isinstance(error, IntegrityError | DataError)
