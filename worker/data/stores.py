"""Files in object stores through fsspec: read by ranges, kept in blocks on the node (`store_cache.py`), and sent as folders.

The contract lists the prefixes that a job may name (`api_schemas/data/stores.py`). Credentials are those of the node's
environment, as fsspec's packages read them (s3fs for s3://, gcsfs for gs://); a job has none. A store that does not answer is
repeated with growing pauses; after the last one an attempt that reads fails with `store_unreachable`, which counts against no
job, and an export that is sent fails alone.
"""

import hashlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from octet.api_schemas import Files, SpecConflict
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
        self.stores.require(str(path))
        system, place = _find_system(str(path), "read")
        if _is_local(path):  # a link may lead out; other stores have none
            StoreAccess(prefixes=_without_links(self.stores.prefixes)).require(f"file://{os.path.realpath(place)}")
        return system, place

    def _ask(self, verb: str, path: Path, call: Callable[[], Result]) -> Result:
        return _ask(verb, path, call, self.pauses_s)


class StoreFolder:
    """A folder in an object store that an export is written to. It is complete when its last file is there."""

    def __init__(self, url: str, stores: StoreAccess) -> None:
        """Connects to nothing. Raises SpecConflict for a place that is not allowed, and DataError for an unknown protocol."""
        stores.require_export(url)
        self._system, self._place = _find_system(url, "write")
        self._url, self._stores = StorePath(url), stores

    def send(self, folder: Path, names: Sequence[str], before_each: Callable[[int], None]) -> None:
        """Send files of a local folder, the last after all others; nothing if all are there already.

        A last file with another content is removed first, so that no mixture of two folders counts. before_each: is called with
        the number of files that were sent. Raises StoreUnreachable, DataError for a store that has less than it was sent, and
        OSError.
        """
        *_, last = names
        expected = (folder / last).read_bytes()
        found = self._read(last)
        if found == expected and all(self._num_bytes(name) == (folder / name).stat().st_size for name in names):
            return
        if found is not None:
            self._ask("remove", last, self._system.rm_file)
        for number, name in enumerate(names):
            before_each(number)
            self._send(folder / name, name)

    def _send(self, file: Path, name: str) -> None:
        def put(place: str) -> None:
            if _is_local(self._url):  # a link may lead out, and folders have to be made; other stores have neither
                allowed = StoreAccess(export_prefixes=_without_links(self._stores.export_prefixes))
                allowed.require_export(f"file://{os.path.realpath(place)}")
                self._system.makedirs(os.path.dirname(place), exist_ok=True)
            self._system.put_file(str(file), place)

        self._ask("write", name, put)
        num_bytes = file.stat().st_size
        if (found := self._num_bytes(name)) != num_bytes:
            raise DataError(f"{self._url / name} has {found} bytes after {num_bytes} were sent. Look at it, and export again.")

    def _read(self, name: str) -> bytes | None:
        try:
            content: bytes = self._ask("read", name, self._system.cat_file)
        except FileNotFoundError:
            return None
        return content

    def _num_bytes(self, name: str) -> int | None:
        """Return the size of a file as the store has it now; None without one."""
        self._system.invalidate_cache()
        try:
            return int(self._ask("find", name, self._system.info)["size"])
        except FileNotFoundError:
            return None

    def _ask(self, verb: str, name: str, call: Callable[[str], Result]) -> Result:
        return _ask(verb, self._url / name, partial(call, f"{self._place.rstrip('/')}/{name}"), PAUSES_S)


def _find_system(url: str, verb: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the place's name there. Raises DataError for a protocol without its package."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        system = fsspec.filesystem(protocol)
    except (ImportError, ValueError) as error:
        raise DataError(f"this node cannot {verb} {protocol}:// ({error}). Have the operator install its package.") from error
    return system, system._strip_protocol(url)


def _is_local(path: StorePath) -> bool:
    return str(path).startswith("file://")


def _without_links(prefixes: Sequence[str]) -> tuple[str, ...]:
    """Return the prefixes that are local folders, with symbolic links resolved."""
    roots = [prefix.removeprefix("file://") for prefix in prefixes if prefix.startswith("file://")]
    return tuple(f"file://{os.path.realpath(root)}" for root in roots)


def _ask(verb: str, path: Path, call: Callable[[], Result], pauses_s: tuple[float, ...]) -> Result:
    """Call a store, again after each pause while it does not answer. Raises StoreUnreachable after the last one."""
    for pause_s in (*pauses_s, None):
        try:
            return call()
        except Exception as error:  # each store's package raises its own
            if isinstance(error, SpecConflict):
                raise
            if isinstance(error, _ANSWERS) and not _hides_a_failure(error):
                why = str(error.strerror or error) or type(error).__name__
                raise type(error)(error.errno or 0, why, str(path)) from error
            if pause_s is None:
                message = f"could not {verb} {path} in {len(pauses_s) + 1} tries: {type(error).__name__}: {error}"
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
