"""Files in object stores, read by ranges through fsspec and kept in blocks on the node (`store_cache.py`).

The contract lists the prefixes that a job may name (`api_schemas/data/stores.py`). Credentials are those of the node's
environment, as fsspec's packages read them (s3fs for s3://, gcsfs for gs://); a job has none. A store that does not answer is
repeated with growing pauses; after the last one the attempt fails with `store_unreachable`, which counts against no job.
"""

import hashlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from octet.api_schemas import Files
from octet.api_schemas.data.stores import StoreAccess, StorePath
from octet.worker.common.errors import DataError, StoreUnreachable
from octet.worker.data.store_cache import BlockCache

BLOCK_BYTES = 4 << 20
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""The pauses between tries, 31.5 s together; a store's own package also waits in each."""
_ANSWERS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
"""Errors that another try would give again."""
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class Stored(NamedTuple):
    """A file or folder in a store. version: changes when its content does."""

    is_folder: bool
    num_bytes: int
    version: str


@dataclass(frozen=True)
class StoreFiles(Files):
    """`Files` that opens and lists a `StorePath` in its store, and any other path as `Files` does."""

    pauses_s: tuple[float, ...] = PAUSES_S
    block_bytes: int = BLOCK_BYTES
    _known: dict[str, Stored] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, files: Files) -> "StoreFiles":
        """Return files that also read the stores that `files` allows."""
        return cls(files.roots, files.max_entries, files.timeout_s, files.stores, pauses_s=PAUSES_S)

    def open(self, path: Path) -> BinaryIO:
        """Open a file for reading; ranges are fetched when they are read."""
        if not isinstance(path, StorePath):
            return super().open(path)
        found = self._find(path)
        if found.is_folder:
            raise IsADirectoryError(21, "Is a folder", str(path))
        return io.BufferedReader(_StoredFile(self, path, found.num_bytes), min(self.block_bytes, 1 << 20))

    def read(self, path: Path, num_bytes: int = -1, start: int = 0) -> bytes:
        """Read a file from `start` to its end, or at most `num_bytes` of it."""
        if not isinstance(path, StorePath):
            return super().read(path, num_bytes, start)
        found = self._find(path)
        stop = found.num_bytes if num_bytes < 0 else min(found.num_bytes, start + num_bytes)
        parts = []
        for number in range(start // self.block_bytes, -(-stop // self.block_bytes) if stop > start else 0):
            first = number * self.block_bytes
            block = self._block(path, found, first)
            parts.append(block[max(start - first, 0) : stop - first])
        return b"".join(parts)

    def num_bytes(self, path: Path) -> int:
        """Return the size of a file."""
        return self._find(path).num_bytes if isinstance(path, StorePath) else super().num_bytes(path)

    def is_folder(self, path: Path) -> bool:
        """Return True if the path leads to a folder, False if to something else or nothing."""
        if not isinstance(path, StorePath):
            return super().is_folder(path)
        try:
            return self._find(path).is_folder
        except FileNotFoundError:
            return False

    def list_below(self, folder: Path, enters: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
        """Yield what lies below a folder, as `Files.list_below` does."""
        if not isinstance(folder, StorePath):
            yield from super().list_below(folder, enters)
            return
        pending = [""]
        while pending:
            parent = pending.pop()
            system, place = self._place_of(folder / parent if parent else folder)
            above = place.rstrip("/") + "/"
            for entry in self._ask("list", folder / parent, partial(system.ls, place, detail=True)):
                name = parent + str(entry["name"]).rstrip("/").removeprefix(above)
                if not str(entry["name"]).startswith(above) or any(part in ("", ".", "..") for part in name.split("/")):
                    continue  # the folder's own mark, or a name that no path can express
                if entry["type"] != "directory":
                    yield name, entry["type"] == "file"
                elif enters(name):
                    pending.append(f"{name}/")

    def _find(self, path: StorePath) -> Stored:
        url = str(path)
        if url not in self._known:
            system, place = self._place_of(path)
            found = self._ask("find", path, partial(system.info, place))
            version = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
            self._known[url] = Stored(found["type"] == "directory", int(found.get("size") or 0), version)
        return self._known[url]

    def _block(self, path: StorePath, found: Stored, first: int) -> bytes:
        system, place = self._place_of(path)
        stop = min(first + self.block_bytes, found.num_bytes)

        def fetch() -> bytes:
            content: bytes = self._ask("read", path, partial(system.cat_file, place, start=first, end=stop))
            if len(content) != stop - first:
                raise DataError(
                    f"{path} gave {len(content)} of its bytes {first} to {stop}; allowed: data that no one changes while a job "
                    "reads it. Write changed data to another place."
                )
            return content

        if self._cache is None:
            return fetch()
        key = hashlib.sha256(f"{path} {found.version} {first} {self.block_bytes}".encode()).hexdigest()
        return self._cache.get(key, stop - first, fetch)

    @cached_property
    def _cache(self) -> BlockCache | None:
        folder = self.stores.cache_folder
        return None if folder is None else BlockCache(Path(folder), self.stores.cache_bytes)

    def _place_of(self, path: StorePath) -> tuple[Any, str]:
        """Return fsspec's file system of a place, and its name there. Raises SpecConflict for a place that is not allowed."""
        import fsspec

        url = str(path)
        self.stores.require(url)
        protocol = url.partition("://")[0]
        try:
            system = fsspec.filesystem(protocol)
        except (ImportError, ValueError) as error:
            raise DataError(f"this node cannot read {protocol}:// ({error}). Have the operator install its package.") from error
        place: str = system._strip_protocol(url)
        if protocol == "file":  # a link may lead out; other stores have none
            roots = [prefix.removeprefix("file://") for prefix in self.stores.prefixes if prefix.startswith("file://")]
            StoreAccess(prefixes=tuple(f"file://{os.path.realpath(root)}" for root in roots)).require(
                f"file://{os.path.realpath(place)}"
            )
        return system, place

    def _ask(self, verb: str, path: Path, call: Callable[[], Result]) -> Result:
        """Call a store, again after each pause while it does not answer. Raises StoreUnreachable after the last one."""
        for pause_s in (*self.pauses_s, None):
            try:
                return call()
            except Exception as error:  # each store's package raises its own
                if isinstance(error, _ANSWERS) and not _hides_a_failure(error):
                    raise type(error)(error.errno or 0, str(error.strerror or type(error).__name__), str(path)) from error
                if pause_s is None:
                    message = f"could not {verb} {path} in {len(self.pauses_s) + 1} tries: {type(error).__name__}: {error}"
                    raise StoreUnreachable(message) from error
                logger.warning("could not %s %s: %r; trying again in %g s", verb, path, error, pause_s)
            time.sleep(pause_s)
        raise AssertionError("the last try returns or raises")


def _hides_a_failure(error: OSError) -> bool:
    """True for an answer that stands for a failure: fsspec's HTTP calls a file missing whenever it could not look."""
    cause = error.__cause__
    is_connection = isinstance(cause, OSError) and not isinstance(cause, _ANSWERS)
    return is_connection or getattr(cause, "status", 0) >= 500


class _StoredFile(io.RawIOBase):
    """A file in a store, as Python reads files."""

    def __init__(self, files: StoreFiles, path: StorePath, num_bytes: int) -> None:
        self._files, self._path, self._num_bytes, self._place = files, path, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._num_bytes}[whence]
        self._place = max(0, start + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        content = self._files.read(self._path, len(buffer), self._place)
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)
