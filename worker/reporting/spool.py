"""An ordered queue of reports, limited only by the disk: the head is in memory, the rest in a file."""

import json
from collections import deque
from pathlib import Path
from threading import Lock
from typing import IO

from api_schemas import Report

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
        self._file: IO[str] | None = None
        self._num_in_file = 0
        self._read_offset = 0
        self._lock = Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._head) + self._num_in_file

    def append(self, report: Report) -> None:
        with self._lock:
            if self._num_in_file == 0 and len(self._head) < self._max_in_memory:
                self._head.append(report)
                return
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("w+")
            self._file.seek(0, 2)
            self._file.write(json.dumps(report.model_dump(mode="json")) + "\n")
            self._file.flush()
            self._num_in_file += 1

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
                self._file.close()
                self._path.unlink(missing_ok=True)
                self._file = None

    def _refill(self) -> None:
        if self._head or not self._num_in_file:
            return
        assert self._file is not None
        self._file.seek(self._read_offset)
        while self._num_in_file and len(self._head) < self._max_in_memory:
            self._head.append(Report.model_validate_json(self._file.readline()))
            self._num_in_file -= 1
        self._read_offset = self._file.tell()
        if not self._num_in_file:
            self._file.truncate(0)
            self._read_offset = 0
