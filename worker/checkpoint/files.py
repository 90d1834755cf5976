"""The files of a checkpoint: their names, what is known of one that was written, and how it is synced and hashed."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FORMAT_VERSION, FORMAT_VERSION_OF_PIECES, FORMAT_VERSION_OF_SHARDS = 1, 2, 3
FORMAT_VERSIONS = (FORMAT_VERSION, FORMAT_VERSION_OF_PIECES, FORMAT_VERSION_OF_SHARDS)
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk. `sha256` is the hash of its manifest."""

    name: str
    num_bytes: int
    sha256: str


class WrittenFile(NamedTuple):
    """A file on disk, with the hash of what it holds."""

    num_bytes: int
    sha256: str


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step_{step:010d}"


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's pieces."""
    return f"rank_{rank:05d}.safetensors"


def finish(path: Path) -> WrittenFile:
    """Sync a file that was written, and hash it."""
    sync(path)
    return WrittenFile(path.stat().st_size, sha256_of(path))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
