"""The audit: a row for each request that was to change something, and for each that was refused for its key.

Nobody waits for a row: those of a quarter of a second are written together, after their answers, and a process that is killed
before that loses them. What cannot be written is logged. Refusals need no key, so those that are stored are limited; all are
counted.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from prometheus_client import CollectorRegistry, Counter

from octet.service import store
from octet.service.access.principal import Principal
from octet.service.db.engine import Database
from octet.service.db.group_commit import GroupCommit
from octet.service.store.audit import Record

MOST_REFUSALS_PER_MINUTE = 60
"""Refused requests that one process stores. A row has 250 bytes, so strangers fill at most 22 MB a day."""
GATHER_S = 0.25
_MOST_TOGETHER = 1000
_LONGEST_METHOD, _LONGEST_PATH = 16, 1024

logger = logging.getLogger(__name__)


class Audit:
    """The audit as one process writes it."""

    def __init__(self, database: Database, registry: CollectorRegistry, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._refused = Counter(
            "octet_refused_keys", "requests refused for a missing or unknown key, or for the role of theirs", registry=registry
        )
        self._clock_s = clock_s
        self._minute, self._num_refused = -1, 0
        self._commits = GroupCommit[Record, None]("octet-audit", self._write, max_weight=_MOST_TOGETHER, gather_s=GATHER_S)

    def record(
        self, principal: Principal | None, method: str, path: str, *, address: str, request_id: str, status: int
    ) -> None:
        """Store a request soon. principal: None if its key is not known."""
        if status in {401, 403} and not self._has_room_for_refusal(method, path, address):
            return
        actor, tenant = (principal.name, principal.tenant) if principal is not None else (None, None)
        record = Record(actor, tenant, method[:_LONGEST_METHOD], path[:_LONGEST_PATH], address, request_id, status)
        self._commits.submit(record).add_done_callback(partial(_log_failure, record))

    def drain(self) -> None:
        """Wait until everything that was recorded is written."""
        self._commits.drain()

    def _has_room_for_refusal(self, method: str, path: str, address: str) -> bool:
        self._refused.inc()
        minute = int(self._clock_s() // 60)
        if minute != self._minute:
            self._minute, self._num_refused = minute, 0
        self._num_refused += 1
        if self._num_refused > MOST_REFUSALS_PER_MINUTE:
            return False
        logger.warning("refused %s %s from %s for its key", method[:_LONGEST_METHOD], repr(path[:_LONGEST_PATH]), address)
        return True

    def _write(self, records: Sequence[Record]) -> list[None]:
        with self._database.write_rows() as connection:
            store.audit.add(connection, records, self._database.now(connection))
        return [None] * len(records)


def _log_failure(record: Record, done: "Future[None]") -> None:
    if (error := done.exception()) is not None:
        logger.error("not stored in the audit: %s: %s", record, error)
