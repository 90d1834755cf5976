"""A folder of blocks that were read from object stores, shared by the ranks of a node and bounded in bytes.

A block is a file that is complete or missing. The sum of all blocks stands in a file; whoever adds a block holds its lock, so
the folder never exceeds its bound. Blocks that were not used for longest leave first.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octet.worker.common.errors import StorageFull, is_storage_full

KEPT_SHARE = 0.75
"""The share of the bound that remains after blocks have left, so that not every new block lists the folder."""
_SUM = "sum-of-bytes"


@dataclass(frozen=True)
class BlockCache:
    """Blocks in a folder. max_bytes: 0 keeps nothing."""

    folder: Path
    max_bytes: int

    def get(self, key: str, num_bytes: int, fetch: Callable[[], bytes]) -> bytes:
        """Return the block of a key, of `num_bytes`, and fetch it unless it is kept. Raises StorageFull if the disk is."""
        path = self.folder / key
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            content = None
        if content is not None and len(content) == num_bytes:
            os.utime(path)
            return content
        content = fetch()
        if num_bytes <= self.max_bytes:
            self._keep(path, content)
        return content

    def _keep(self, path: Path, content: bytes) -> None:
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked_sum() as total:
                if path.exists():  # another rank was faster
                    return
                total[0] += len(content)
                if total[0] > self.max_bytes:
                    total[0] = self._make_room(len(content)) + len(content)
                unfinished.write_bytes(content)
                unfinished.rename(path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            if is_storage_full(error):
                raise StorageFull(f"the cache of object stores in {self.folder} takes no more: {error}") from error
            raise

    def _make_room(self, num_bytes: int) -> int:
        """Remove the blocks that were not used for longest until there is room; returns the bytes of the others."""
        blocks = []
        for entry in os.scandir(self.folder):
            if entry.name != _SUM:
                found = entry.stat()
                blocks.append((found.st_mtime_ns, found.st_size, entry.path))
        kept, allowed = sum(size for _, size, _ in blocks), max(0, min(self.max_bytes * KEPT_SHARE, self.max_bytes - num_bytes))
        for _, size, path in sorted(blocks):
            if kept <= allowed:
                break
            os.unlink(path)
            kept -= size
        return kept

    @contextmanager
    def _locked_sum(self) -> Iterator[list[int]]:
        """Lock the folder and give the sum of its blocks' bytes, in a list; what stands there at the end is written."""
        with open(os.open(self.folder / _SUM, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            total = [int(file.read() or b"0")]
            yield total
            file.seek(0)
            file.truncate()
            file.write(str(total[0]).encode())
