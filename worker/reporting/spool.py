"""An ordered queue of reports, limited only by the disk: the head is in memory, the rest in a file.

A disk that takes no more does not end the rank: what is queued from then on stays in memory, behind the file.
"""

import json
import os
from collections import deque
from pathlib import Path
from threading import Lock

from octet.api_schemas import Report
from octet.worker.common.errors import is_storage_full

_MAX_IN_MEMORY = 4096


class Spool:
    """First in, first out. Any thread may call `append`; only the sender's thread calls `peek` and `drop`.

    The head of the queue is in memory. Once memory is full, later reports go to the file until the file has been read to
    its end, so the order is kept. Each attempt has its own file, which is removed when the queue is closed.
    """

    def __init__(self, path: Path, max_in_memory: int = _MAX_IN_MEMORY) -> None:
        self._path = path
        self._max_in_memory = max_in_memory
        self._head: deque[Report] = deque()
        self._tail: deque[Report] = deque()  # the reports that the full disk did not take
        self._file: int | None = None
        self._num_in_file = 0
        self._num_bytes = 0
        self._read_offset = 0
        self._lock = Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._head) + self._num_in_file + len(self._tail)

    def append(self, report: Report) -> None:
        with self._lock:
            if not self._num_in_file and not self._tail and len(self._head) < self._max_in_memory:
                self._head.append(report)
            elif self._tail or not self._write(report):
                self._tail.append(report)

    def peek(self, count: int) -> list[Report]:
        """Return the oldest reports, at most `count`. They stay in the queue until `drop`."""
        with self._lock:
            self._refill()
            return [self._head[index] for index in range(min(count, len(self._head)))]

    def drop(self, acknowledged_seq: int) -> None:
        """Remove the reports up to this sequence number."""
        with self._lock:
            self._refill()
            while self._head and self._head[0].seq <= acknowledged_seq:
                self._head.popleft()
                self._refill()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._path.unlink(missing_ok=True)
                self._file = None

    def _write(self, report: Report) -> bool:
        """Add the report to the file. Returns False, and leaves the file as it was, if the disk is full."""
        line = (json.dumps(report.model_dump(mode="json")) + "\n").encode()
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            if os.write(self._file, line) < len(line):
                os.ftruncate(self._file, self._num_bytes)
                return False
        except OSError as error:
            if is_storage_full(error):
                return False
            raise
        self._num_bytes += len(line)
        self._num_in_file += 1
        return True

    def _refill(self) -> None:
        if self._head:
            return
        if not self._num_in_file:
            while self._tail and len(self._head) < self._max_in_memory:
                self._head.append(self._tail.popleft())
            return
        assert self._file is not None
        with self._path.open("rb") as file:
            file.seek(self._read_offset)
            while self._num_in_file and len(self._head) < self._max_in_memory:
                self._head.append(Report.model_validate_json(file.readline()))
                self._num_in_file -= 1
            self._read_offset = file.tell()
        if not self._num_in_file:
            os.ftruncate(self._file, 0)
            self._read_offset = self._num_bytes = 0
