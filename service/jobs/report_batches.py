"""Applies the batches of all ranks: those that arrive together in one transaction, and each as if it were alone.

A token that was an attempt's once is remembered, so a rank's next batch is read without asking the database first. Whether it
still counts is decided where the batch is applied.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import partial

from sqlalchemy.orm import Session

from service import store
from service.db.engine import Database
from service.db.together import Together
from service.errors import ServiceError
from service.jobs import reports
from service.jobs.reports import Applied
from service.jobs.step_batches import StepBatch
from service.jobs.usual_reports import SentBatch, apply_usual, may_be_usual
from service.store.ids import is_id

_MAX_REPORTS_TOGETHER = 2000
"""In one transaction. It takes about a tenth of a second; a batch that arrives meanwhile waits for so long."""
_TOKENS_KEPT = 10_000


class ReportBatches:
    """The reports of one process."""

    def __init__(self, database: Database, lease_s: float) -> None:
        """lease_s: how long a report renews its attempt's lease for, in seconds."""
        self._database = database
        self._lease_s = lease_s
        self._token_hashes: dict[str, bytes] = {}
        self._together = Together[SentBatch, Applied](
            "octet-reports", self._apply_all, max_weight=_MAX_REPORTS_TOGETHER, weigh=lambda sent: 20 + len(sent.batch.reports)
        )

    def add(self, sent: SentBatch) -> "Future[Applied]":
        """Apply a batch soon. The future raises what `reports.apply` raises, and the database's errors."""
        return self._together.add(sent)

    def ask(self, sent: SentBatch) -> "asyncio.Future[Applied]":
        """Apply a batch soon, for the event loop that runs. The future raises as that of `add` does."""
        return self._together.ask(sent)

    def tell(self, sent: SentBatch, answered: Callable[[Applied | Exception], None]) -> None:
        """Apply a batch soon, and let the event loop that runs call `answered` with what `ask` returns or raises."""
        self._together.tell(sent, answered)

    def remembers(self, attempt_id: str, token: str) -> bool:
        """Return True if `knows` has found this token to be the attempt's."""
        return hmac.compare_digest(self._token_hashes.get(attempt_id, b""), _hash(token))

    def knows(self, attempt_id: str, token: str) -> bool:
        """Return True if the token was made at the launch of this attempt. Raises the database's errors."""
        if self.remembers(attempt_id, token):
            return True
        with self._database.read() as session:
            attempt = store.jobs.find_attempt(session, attempt_id) if is_id("att", attempt_id) else None
            if not reports.is_token_of(attempt, token):
                return False
        while len(self._token_hashes) >= _TOKENS_KEPT:
            self._token_hashes.pop(next(iter(self._token_hashes)), None)
        self._token_hashes[attempt_id] = _hash(token)
        return True

    def _apply_all(self, together: Sequence[SentBatch]) -> "Sequence[Applied | Exception]":
        if len({sent.attempt_id for sent in together}) == len(together) and all(may_be_usual(sent.batch) for sent in together):
            with suppress(_Unusual):
                return self._apply_usual(together)
        return self._decide_all(together)

    def _apply_usual(self, together: Sequence[SentBatch]) -> list[Applied]:
        """Apply batches of which there is nothing to decide. Raises _Unusual, and does nothing, if there is after all."""
        with self._database.write_rows_quickly() as transaction:
            store.reporting.lock_jobs(transaction, sorted({sent.attempt_id for sent in together}))
            applied = apply_usual(transaction, together, self._lease_s, partial(self._database.now, transaction))
            if len(applied) < len(together):
                raise _Unusual
        return [applied[number] for number in range(len(together))]

    def _decide_all(self, together: Sequence[SentBatch]) -> "list[Applied | Exception]":
        answers: dict[int, Applied | Exception] = {}
        with self._database.write_rows() as connection:
            # Two processes that lock the same jobs lock them in this order.
            store.reporting.lock_jobs(connection, sorted({sent.attempt_id for sent in together}))
            now = self._database.now(connection)
            answers |= apply_usual(connection, together, self._lease_s, lambda _: now)
            if len(answers) < len(together):
                with Session(connection, expire_on_commit=False) as session, session.begin():
                    for number, sent in enumerate(together):
                        if number not in answers:
                            answers[number] = self._decide(session, sent, now)
        return [answers[number] for number in range(len(together))]

    def _decide(self, session: Session, sent: SentBatch, now: datetime) -> Applied | ServiceError:
        batch = sent.batch.as_contract() if isinstance(sent.batch, StepBatch) else sent.batch
        try:
            # An empty batch is refused before it changes anything; another may be refused in the middle.
            with session.begin_nested() if batch.reports else nullcontext():
                return reports.apply(session, sent.attempt_id, sent.token, batch, self._lease_s, now)
        except ServiceError as error:
            return error


class _Unusual(Exception):
    """There is something to decide about a batch."""


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
