"""Opens what ranks wrote into the folder of their job, without following a link on the way there.

Ranks run a user's code, which may put links into its folder, and may be another user than this process: where a link leads,
only this process could read or delete.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe without a writer must not hold a thread


@contextmanager
def opened_folder(job_dir: Path, *names: str) -> Iterator[int]:
    """Open a folder below a job's. Raises OSError, also if one of the names is a link."""
    descriptor = os.open(job_dir, _FOLDER)
    try:
        for name in names:
            inner = os.open(name, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(job_dir: Path, *names: str) -> int:
    """Open a file below a job's folder for reading, and return its descriptor. Raises OSError as `opened_folder` does."""
    with opened_folder(job_dir, *names[:-1]) as folder:
        descriptor = os.open(names[-1], _FILE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(f"{names[-1]} is no file")
    return descriptor


def delete_folder(job_dir: Path, *names: str) -> None:
    """Delete a folder below a job's, or the job's own, if it is there. Raises OSError as `opened_folder` does."""
    try:
        if not names:
            shutil.rmtree(job_dir)
            return
        with opened_folder(job_dir, *names[:-1]) as folder:
            shutil.rmtree(names[-1], dir_fd=folder)
    except FileNotFoundError:
        return
