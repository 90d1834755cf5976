"""Authenticate ranks. A token that was an attempt's once is remembered, so its next batch needs no query.

Whether the attempt still counts is decided where the batch is applied.
"""

import hashlib
import hmac

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from octet.service import store
from octet.service.db.engine import Database
from octet.service.ingest.decide import is_hash_of
from octet.service.store.ids import is_id

TOKENS_KEPT = 10_000
_THREADS = 8


class AttemptTokens:
    """The tokens that one process has seen. Queries have threads of their own: readers cannot keep a rank from its lease."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._hashes: dict[str, bytes] = {}
        self._threads = CapacityLimiter(_THREADS)

    async def verify(self, attempt_id: str, token: str) -> bool:
        """Return True if the token was made at the launch of this attempt. Raises the database's errors."""
        return self.is_remembered(attempt_id, token) or await run_sync(self._look_up, attempt_id, token, limiter=self._threads)

    def is_remembered(self, attempt_id: str, token: str) -> bool:
        """Return True if `verify` has found this token to be the attempt's."""
        return hmac.compare_digest(self._hashes.get(attempt_id, b""), _hash(token))

    def _look_up(self, attempt_id: str, token: str) -> bool:
        with self._database.read() as session:
            attempt = store.jobs.find_attempt(session, attempt_id) if is_id("att", attempt_id) else None
            if not is_hash_of(attempt.token_hash if attempt is not None else None, token):
                return False
        while len(self._hashes) >= TOKENS_KEPT:
            self._hashes.pop(next(iter(self._hashes)), None)
        self._hashes[attempt_id] = _hash(token)
        return True


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
