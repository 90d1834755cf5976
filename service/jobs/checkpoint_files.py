"""The files of a checkpoint, where this process can read the folder that the job's workers wrote them to.

Only files that the manifest lists are shown or sent, and the manifest counts only with the SHA-256 that was registered. So what
else lies in the folder, and what lies elsewhere, cannot be reached.
"""

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any

from octet.api_schemas import CheckpointFile
from octet.service.db.tables import CheckpointRow
from octet.service.errors import NotFound
from octet.service.settings import Settings

MANIFEST = "manifest.json"
_LARGEST_MANIFEST_BYTES = 64 << 20


def files_of(settings: Settings, row: CheckpointRow) -> list[CheckpointFile]:
    """List a checkpoint's files, the manifest last. Raises NotFound where they cannot be read here, or were changed."""
    folder = _folder(settings, row)
    content = _manifest(folder, row)
    try:
        listed: dict[str, Any] = json.loads(content)["files"]
        files = [
            CheckpointFile(path=path, num_bytes=file["num_bytes"], sha256=file["sha256"])
            for path, file in listed.items()
            if _is_below_its_folder(path)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotFound(f"the manifest of checkpoint {row.name} of job {row.job_id} is not of this version") from error
    return [*files, CheckpointFile(path=MANIFEST, num_bytes=len(content), sha256=row.sha256)]


def path_of(settings: Settings, row: CheckpointRow, path: str) -> Path:
    """Return the place of a listed file. Raises NotFound for any other path, and for files that cannot be read here."""
    if path not in [file.path for file in files_of(settings, row)]:
        raise NotFound(f"checkpoint {row.name} of job {row.job_id} has no file {path!r}; its list of files has them all")
    folder = _folder(settings, row)
    place = folder / path
    if not place.is_file() or not place.resolve().is_relative_to(folder.resolve()):
        raise NotFound(f"{path} of checkpoint {row.name} is not in this server's data folder any more")
    return place


def _folder(settings: Settings, row: CheckpointRow) -> Path:
    return settings.job_dir(row.job_id) / "checkpoints" / row.name


def _manifest(folder: Path, row: CheckpointRow) -> bytes:
    try:
        with (folder / MANIFEST).open("rb") as file:
            content = file.read(_LARGEST_MANIFEST_BYTES)
    except OSError as error:
        raise NotFound(
            f"the files of checkpoint {row.name} of job {row.job_id} cannot be read here ({error.strerror}): they were "
            "deleted, or this server does not share the workers' data folder. Mount it at OCTET_DATA_DIR, or copy them from "
            "a worker"
        ) from error
    if hashlib.sha256(content).hexdigest() != row.sha256:
        raise NotFound(
            f"checkpoint {row.name} of job {row.job_id} is damaged: its manifest does not have the registered SHA-256. "
            "Use another"
        )
    return content


def _is_below_its_folder(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\\" not in path and "\x00" not in path
