"""The files that a job may read. Service and ranks open and list them by these rules.

A path is checked after it is opened, because a link can be pointed elsewhere between a check and an opening: the kernel says
where an open file lies (/proc/self/fd), and an opening with O_PATH has no effect on what it opens, such as a pipe or a device.
"""

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from octet.api_schemas.base import SpecConflict, refusal
from octet.api_schemas.data.stores import NO_STORES, StoreAccess

NEVER_READ = ("/proc", "/sys", "/dev")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""The form of a name such as org/model. A relative path of two parts has it too."""
NO_HUBS = "That looks like the id of a hub, and hubs are not reached."


def absolute_path(field: str, path: str) -> str:
    """Return a path as it is. Raises a refusal unless it is absolute."""
    if "\0" in path or not path.startswith("/"):
        allowed = "an absolute path without a zero byte"
        raise refusal("", got=path, allowed=allowed, change=change_of_relative(field, path))
    return path


def change_of_relative(field: str, path: str) -> str:
    """Return what to change for a path that is not absolute. It may be the id of a model or a data set on a hub."""
    if "\0" in path:
        return f"Change {field}: a path cannot contain a zero byte."
    absolute = "the absolute path of a file or folder below one of the server's data roots (octet serve --data-root)"
    if path.startswith("~"):
        return f"~ is not expanded, because a worker may be another user. Set {field} to {absolute}."
    if HUB_ID.fullmatch(path):
        return f"{NO_HUBS} Download it, and set {field} to {absolute}. A relative path has no meaning to a worker."
    return f"A relative path has no meaning to a worker. Set {field} to {absolute}."


def outside_of_roots(field: str, path: object, roots: Iterable[str]) -> SpecConflict:
    """Build the error of a path that no root contains. It does not say what is there."""
    allowed = f"a file or folder inside {', '.join(roots)}, and never {', '.join(NEVER_READ)}"
    change = (
        f"The path is outside of the server's data roots. Change {field}, or have the operator add its folder: "
        "octet serve --data-root FOLDER, or OCTET_DATA_ROOTS."
    )
    return SpecConflict(field, path, allowed, change)


@dataclass(frozen=True)
class Files:
    """The folders whose files may be read (None: no restriction), and the limits of listing a folder.

    `roots` have no links in them (see `resolved`). /proc, /sys and /dev are closed, whatever the roots are. Methods raise
    SpecConflict for a path outside, and OSError.
    """

    roots: tuple[str, ...] | None = None
    max_entries: int | None = None
    timeout_s: float | None = None
    stores: StoreAccess = NO_STORES

    @classmethod
    def below(cls, folders: tuple[Path, ...], stores: StoreAccess = NO_STORES) -> "Files":
        """Allow the files below these folders, which may be links themselves, and what `stores` allows a rank to read."""
        return cls(tuple(str(folder.resolve()) for folder in folders), stores=stores)

    def open(self, path: Path) -> BinaryIO:
        """Open a regular file for reading."""
        with self._located(path) as descriptor:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SpecConflict("data.path", path, "a regular file", "Change data.path or exclude the file.")
            return open(_link(descriptor) if hasattr(os, "O_PATH") else path, "rb")

    def read(self, path: Path, num_bytes: int = -1, start: int = 0) -> bytes:
        """Read a file from `start` to its end, or at most `num_bytes` of it."""
        with self.open(path) as file:
            file.seek(start)
            # Python allocates what is asked for before it reads, 256 MiB for a tokenizer's settings of 1 KiB.
            num_left = max(0, os.fstat(file.fileno()).st_size - start)
            return file.read(num_left if num_bytes < 0 else min(num_bytes, num_left))

    def num_bytes(self, path: Path) -> int:
        """Return the size of a file."""
        with self._located(path) as descriptor:
            return os.fstat(descriptor).st_size

    def is_folder(self, path: Path) -> bool:
        """Return True if the path leads to a folder, False if to something else or nothing."""
        try:
            with self._located(path) as descriptor:
                return stat.S_ISDIR(os.fstat(descriptor).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def list_below(self, folder: Path, enters: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
        """Yield what lies below a folder: the relative path, and True for a regular file. Folders are not yielded.

        `enters` decides about each subfolder. Links are not followed; subfolders that cannot be read are left out. Raises
        SpecConflict, which names the limit, for more entries or more time than allowed.
        """
        ends_at = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        pending, num_entries = [""], 0
        while pending:
            parent = pending.pop()
            try:
                descriptor = self._open_folder(folder, parent)
            except (OSError, SpecConflict):
                if not parent:
                    raise
                continue
            try:
                with os.scandir(descriptor) as entries:
                    for entry in entries:
                        num_entries += 1
                        self._check_limits(folder, num_entries, ends_at)
                        name = parent + entry.name
                        if not entry.is_dir(follow_symlinks=False):
                            yield name, entry.is_file(follow_symlinks=False)
                        elif enters(name):
                            pending.append(f"{name}/")
            finally:
                os.close(descriptor)

    def _open_folder(self, folder: Path, subfolder: str) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if subfolder else 0)
        descriptor = os.open(folder / subfolder, flags)
        try:
            self._require_inside(descriptor, folder / subfolder)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @contextmanager
    def _located(self, path: Path) -> Iterator[int]:
        """Open a path without any effect on what is there, and check where it lies."""
        descriptor = os.open(path, getattr(os, "O_PATH", os.O_RDONLY))
        try:
            self._require_inside(descriptor, path)
            yield descriptor
        finally:
            os.close(descriptor)

    def _require_inside(self, descriptor: int, path: Path) -> None:
        if self.roots is None:
            return
        found = os.readlink(_link(descriptor))
        if any(_is_below(found, closed) for closed in NEVER_READ) or not any(_is_below(found, root) for root in self.roots):
            raise outside_of_roots("data.path", path, self.roots)

    def _check_limits(self, folder: Path, num_entries: int, ends_at: float | None) -> None:
        change = "Name a smaller folder, exclude subfolders with globs such as build/**, or have the operator raise the limit."
        if self.max_entries is not None and num_entries > self.max_entries:
            raise SpecConflict(
                "data.path", folder, f"at most {self.max_entries} entries below it (data_check_max_entries)", change
            )
        if ends_at is not None and time.monotonic() > ends_at:
            allowed = f"a folder that can be listed and checked within {self.timeout_s:g} s (data_check_timeout_s)"
            raise SpecConflict("data.path", folder, allowed, change)


ANY_FILE = Files()


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _link(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"
