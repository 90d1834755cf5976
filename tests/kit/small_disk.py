"""A real file system that a test fills: a tmpfs of a few MiB."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_BLOCK = bytes(4096)


class SmallDisk:
    """A file system of its own at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Take every free byte."""
        with (self.path / "filler").open("ab", buffering=0) as file:
            try:
                while file.write(_BLOCK):
                    pass
            except OSError:
                pass
        assert os.statvfs(self.path).f_bavail == 0

    def free(self) -> None:
        """Give back what `fill` took."""
        (self.path / "filler").unlink()


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """Mount a tmpfs of this size at `path`; skip the test where that is not allowed."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "octet-test", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"missing: the right to mount a tmpfs (root with CAP_SYS_ADMIN): {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
