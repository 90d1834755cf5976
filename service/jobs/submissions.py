"""Stores submissions, those that arrive together in one transaction."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from octet.service import store
from octet.service.db.bulk import Transaction
from octet.service.db.engine import Database
from octet.service.db.group_commit import GroupCommit
from octet.service.jobs import commands
from octet.service.jobs.requests import Request, Submission
from octet.service.logs import fields_of_job

logger = logging.getLogger(__name__)


class Shown(NamedTuple):
    """A job as the answer shows it: rendered as JSON, and whether the next pass of the dispatcher starts or plans it."""

    job_id: str
    text: str
    starts_soon: bool


Show = Callable[[Transaction, Sequence[tuple[Request, Submission]]], list[Shown]]
"""Shows the submitted jobs, in the transaction that stores them."""


class Stored(NamedTuple):
    """A stored job. `replayed` is true if an earlier submission with the same idempotency key stored it."""

    job: Shown
    replayed: bool


class Submissions:
    """The submissions of one process."""

    def __init__(self, database: Database, show: Show) -> None:
        self._database = database
        self._show = show
        self._commits = GroupCommit[Request, Stored]("octet-submissions", self._store, owner=lambda request: request.tenant)

    def submit(self, request: Request) -> "Future[Stored]":
        """Store a job soon. The future raises IdempotencyMismatch, and the database's errors."""
        return self._commits.submit(request)

    def submit_async(self, request: Request) -> "asyncio.Future[Stored]":
        """Do the same as `submit`, with a future of the event loop that runs."""
        return self._commits.submit_async(request)

    def submit_together(self, requests: Sequence[Request]) -> list[Stored]:
        """Store jobs in one transaction, all or none. Raises IdempotencyMismatch, and the database's errors."""
        return [each for each in self._store(requests, together=True) if isinstance(each, Stored)]

    def _store(self, requests: Sequence[Request], *, together: bool = False) -> "list[Stored | Exception]":
        with self._database.write_rows() as connection:
            newest = store.jobs.newest_job(connection)
            results = commands.submit_all(connection, requests, self._database.now(connection, newest.read_at), newest.id)
            if together:
                for result in results:
                    if isinstance(result, Exception):
                        raise result
            pairs = zip(requests, results, strict=True)
            stored = [(request, result) for request, result in pairs if isinstance(result, Submission)]
            shown = iter(self._show(connection, stored))
        for request, result in stored:
            if not result.replayed:
                fields = {**request.log_fields, **fields_of_job(result.job.id, None, request.traceparent)}
                words = "job %s (%s) submitted, for pool %s"
                logger.info(words, result.job.id, request.spec.name, request.spec.resources.pool, extra=fields)
        return [Stored(next(shown), result.replayed) if isinstance(result, Submission) else result for result in results]
