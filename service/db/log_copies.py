"""Copies SQLite's write-ahead log into the database while others commit.

SQLite does so itself in the commit that fills a thousand pages of the log, and all that wait for that commit wait for it too.
Here a thread copies after every `COMMITS` commits, and holds writers up only for the few pages that were added meanwhile; after
that the log begins again. A commit that finds far more pages copies them, as before, so the log stays bounded.
"""

import logging
import sqlite3
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

COMMITS = 64
"""Commits between two copies; a submission writes about 15 pages of 4 KiB."""
MOST_PAGES = 4096
"""Pages of the log (16 MiB) at which a commit copies them itself."""
_COPIES_WHILE_OTHERS_WRITE = 2

logger = logging.getLogger(__name__)


class LogCopies:
    """Copies the log of one database in a thread, which starts with the first copy."""

    def __init__(self, path: str, turn_to_write: Callable[[], AbstractContextManager[object]]) -> None:
        """path: of the database. turn_to_write: keeps the other writers of this process away, or raises."""
        self._path = path
        self._turn_to_write = turn_to_write
        self._num_commits = 0
        self._due, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def committed(self) -> None:
        """Count a commit. Called by one thread at a time."""
        self._num_commits += 1
        if self._num_commits < COMMITS or self._closing.is_set():
            return
        self._num_commits = 0
        self._due.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="octet-log-copies", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread after the copy under way."""
        self._closing.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            while True:
                self._due.wait()
                if self._closing.is_set():
                    return
                self._due.clear()
                try:
                    self._copy(connection)
                except Exception as error:  # noqa: BLE001  a commit copies the log later
                    logger.warning("the database's log was not copied: %s", error)
        finally:
            connection.close()

    def _copy(self, connection: sqlite3.Connection) -> None:
        for _ in range(_COPIES_WHILE_OTHERS_WRITE):
            if copied_all(connection):
                return
        with self._turn_to_write():
            copied_all(connection)


def copied_all(connection: sqlite3.Connection) -> bool:
    """Copy what no reader or other writer prevents; returns True if nothing of the log is left."""
    _, num_pages, num_copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return bool(num_pages == num_copied)
