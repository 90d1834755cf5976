"""The files of a checkpoint or an export, where this process can read the folder that the job's workers wrote them to.

Only files that the manifest lists are shown or sent, and the manifest counts only with the SHA-256 that was registered. So what
else lies in the folder, and what lies elsewhere, cannot be reached.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from octet.api_schemas import CheckpointFile
from octet.service.db.tables import CheckpointRow, ExportRow
from octet.service.errors import NotFound
from octet.service.jobs.job_folders import open_file
from octet.service.settings import Settings

MANIFEST = "manifest.json"
_LARGEST_MANIFEST_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
Stored = CheckpointRow | ExportRow
"""A folder with a manifest that a worker wrote, below a folder of the job that is named as the table is."""


class Archive(NamedTuple):
    """A folder as one tar file, made while it is sent."""

    num_bytes: int
    content: Iterator[bytes]


def files_of(settings: Settings, row: Stored) -> list[CheckpointFile]:
    """List the files, the manifest last. Raises NotFound where they cannot be read here, or were changed."""
    content = _manifest(settings, row)
    try:
        listed: dict[str, Any] = json.loads(content)["files"]
        files = [
            CheckpointFile(path=path, num_bytes=file["num_bytes"], sha256=file["sha256"])
            for path, file in listed.items()
            if _is_below_its_folder(path)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotFound(f"the manifest of {_name(row)} is not of this version") from error
    return [*files, CheckpointFile(path=MANIFEST, num_bytes=len(content), sha256=row.sha256)]


def open_listed(settings: Settings, row: Stored, path: str) -> int:
    """Open a listed file, and return its descriptor. Raises NotFound for any other path, and if it cannot be read here."""
    if path not in [file.path for file in files_of(settings, row)]:
        raise NotFound(f"{_name(row)} has no file {path!r}; its list of files has them all")
    try:
        return _open(settings, row, path)
    except OSError as error:
        raise NotFound(f"{path} of {_name(row)} is not in this server's data folder any more") from error


def archive_of(settings: Settings, row: Stored) -> Archive:
    """Return all files as a tar archive, in a folder of the stored name. Raises NotFound as `open_listed` does.

    A file that is changed or removed while it is read ends the answer early, so that it does not pass for whole.
    """
    parts = []
    for file in files_of(settings, row):
        head = tarfile.TarInfo(f"{row.name}/{file.path}")
        head.size, head.mode, head.mtime = file.num_bytes, 0o644, int(row.created_at.timestamp())
        parts.append((head.tobuf(tarfile.GNU_FORMAT), file.path, file.num_bytes))
        os.close(open_listed(settings, row, file.path))
    num_bytes = sum(len(head) + _padded(size) for head, _, size in parts) + 2 * tarfile.BLOCKSIZE

    def content() -> Iterator[bytes]:
        for head, path, size in parts:
            yield head
            left = size
            with os.fdopen(_open(settings, row, path), "rb") as file:
                while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                    left -= len(chunk)
                    yield chunk
            if left:
                raise OSError(f"{path} of {_name(row)} lost {left} bytes while it was sent")
            yield bytes(_padded(size) - size)
        yield bytes(2 * tarfile.BLOCKSIZE)

    return Archive(num_bytes, content())


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _open(settings: Settings, row: Stored, path: str) -> int:
    return open_file(settings.job_dir(row.job_id), row.__tablename__, row.name, *PurePosixPath(path).parts)


def _name(row: Stored) -> str:
    return f"{row.__tablename__.removesuffix('s')} {row.name} of job {row.job_id}"


def _manifest(settings: Settings, row: Stored) -> bytes:
    try:
        with os.fdopen(_open(settings, row, MANIFEST), "rb") as file:
            content = file.read(_LARGEST_MANIFEST_BYTES)
    except OSError as error:
        raise NotFound(
            f"the files of {_name(row)} cannot be read here ({error.strerror}): they were "
            "deleted, or this server does not share the workers' data folder. Mount it at OCTET_DATA_DIR, or copy them from "
            "a worker"
        ) from error
    if hashlib.sha256(content).hexdigest() != row.sha256:
        raise NotFound(f"{_name(row)} is damaged: its manifest does not have the registered SHA-256. Use another")
    return content


def _is_below_its_folder(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\\" not in path and "\x00" not in path
