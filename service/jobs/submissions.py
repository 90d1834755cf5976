"""Stores submissions, those that arrive together in one transaction."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from service import store
from service.db.bulk import Transaction
from service.db.engine import Database
from service.db.together import Together
from service.jobs import commands
from service.jobs.requests import Request, Submission
from service.store.tallies import Before


class Shown(NamedTuple):
    """A job as the answer shows it: rendered as JSON, and whether the next pass of the dispatcher starts it."""

    job_id: str
    text: str
    starts_soon: bool


Show = Callable[[Transaction, Sequence[tuple[Request, Submission]], Before], list[Shown]]
"""Shows the submitted jobs, in the transaction that stores them, given what it found before."""


class Stored(NamedTuple):
    """A stored job. `replayed` is true if an earlier submission with the same idempotency key stored it."""

    job: Shown
    replayed: bool


class Submissions:
    """The submissions of one process."""

    def __init__(self, database: Database, show: Show) -> None:
        self._database = database
        self._show = show
        self._together = Together[Request, Stored]("octet-submissions", self._store)

    def add(self, request: Request) -> "Future[Stored]":
        """Store a job soon. The future raises IdempotencyMismatch, and the database's errors."""
        return self._together.add(request)

    def ask(self, request: Request) -> "asyncio.Future[Stored]":
        """Store a job soon, for the event loop that runs. The future raises as that of `add` does."""
        return self._together.ask(request)

    def _store(self, requests: Sequence[Request]) -> "list[Stored | Exception]":
        with self._database.write_rows() as connection:
            before = store.tallies.read_before_adding(connection)
            results = commands.submit_all(connection, requests, self._database.now(connection, before.at), before.last_job_id)
            pairs = zip(requests, results, strict=True)
            stored = [(request, result) for request, result in pairs if isinstance(result, Submission)]
            shown = iter(self._show(connection, stored, before))
        return [Stored(next(shown), result.replayed) if isinstance(result, Submission) else result for result in results]
