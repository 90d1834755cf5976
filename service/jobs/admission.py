"""What can be known of a job at submission and needs this server to know it: its pool, its slots, its text.

Reads the file system as the workers will, with bounds: a folder with more than `MAX_FILES` text files is taken to be
large enough. Raises InvalidRequest with one violation; returns nothing.
"""

import difflib
import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from api_schemas import DataSpec, JobSpec, Violation
from service.errors import InvalidRequest
from service.settings import Settings

MAX_FILES = 2_000
MAX_ENTRIES = 200_000
NEVER_READ = (Path("/proc"), Path("/sys"), Path("/dev"))
_BINARY_PROBE_BYTES = 8192


def check(spec: JobSpec, settings: Settings) -> None:
    """Raise InvalidRequest for a job that could not run here."""
    _check_pool(spec, settings)
    path = _readable_path(spec.data, settings)
    if path.is_dir():
        _check_folder(path, spec)
    else:
        size = path.stat().st_size
        num_evaluation_bytes = math.ceil(size * spec.data.evaluation_fraction)
        _check_length(spec, size - num_evaluation_bytes, num_evaluation_bytes)


def _check_pool(spec: JobSpec, settings: Settings) -> None:
    wanted, names = spec.resources, [pool.name for pool in settings.pools]
    pool = settings.pool(wanted.pool)
    if pool is None:
        close = difflib.get_close_matches(wanted.pool, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        _refuse("resources.pool", wanted.pool, ", ".join(names), f"no such pool.{hint} Change resources.pool.")
    if wanted.workers > pool.slots:
        _refuse(
            "resources.workers",
            str(wanted.workers),
            f"at most {pool.slots}, all the slots that pool {pool.name!r} will ever have",
            "Lower resources.workers or choose another pool.",
        )


def _readable_path(data: DataSpec, settings: Settings) -> Path:
    """Where the path leads once links are resolved. Says nothing of what lies outside the allowed folders."""
    try:
        path = Path(data.path).resolve()
    except (OSError, RuntimeError) as error:
        _refuse("data.path", data.path, "a path that can be resolved", f"Change data.path: {_words(error)}.")
    roots = settings.readable_roots
    if any(path.is_relative_to(never) for never in NEVER_READ) or not any(path.is_relative_to(root) for root in roots):
        allowed = f"a file or folder inside {', '.join(map(str, roots))}, and never {', '.join(map(str, NEVER_READ))}"
        _refuse("data.path", data.path, allowed, "Change data.path, or have the operator add its folder to the data roots.")
    try:
        is_there = path.is_file() or path.is_dir()
    except OSError as error:
        _refuse("data.path", data.path, "a path that can be read", f"Change data.path: {_words(error)}.")
    if not is_there:
        _refuse("data.path", data.path, "a file or folder that exists", "Nothing of that kind is there. Change data.path.")
    if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        _refuse("data.path", data.path, "a path that the service can read", "Change its permissions or data.path.")
    return path


def _check_folder(root: Path, spec: JobSpec) -> None:
    """The same choice of files, in the same order, as `worker.data.text` makes."""
    sizes: dict[str, int] = {}
    for num_entries, (name, path) in enumerate(_files(root)):
        if num_entries >= MAX_ENTRIES or len(sizes) >= MAX_FILES:
            return
        if spec.data.selects(name) and not path.is_symlink() and path.is_file() and not _is_binary(path, spec.data):
            sizes[name] = path.stat().st_size
    if len(sizes) < 2:
        _refuse(
            "data.include",
            ", ".join(spec.data.include),
            "globs that select at least two text files, one to train on and one to evaluate",
            f"{len(sizes)} of the files in {spec.data.path} are selected. Change data.include, data.exclude or data.path.",
        )
    ordered = sorted(sizes, key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())
    num_evaluation = min(len(ordered) - 1, math.ceil(len(ordered) * spec.data.evaluation_fraction))
    evaluation, train = ordered[:num_evaluation], ordered[num_evaluation:]
    _check_length(spec, _joined_bytes(sizes, train), _joined_bytes(sizes, evaluation))


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            yield path.relative_to(root).as_posix(), path


def _is_binary(path: Path, data: DataSpec) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(_BINARY_PROBE_BYTES)
    except OSError as error:
        _refuse("data.path", str(path), "files that the service can read", f"{_words(error)}. Make it readable or exclude it.")


def _joined_bytes(sizes: dict[str, int], names: list[str]) -> int:
    return sum(sizes[name] for name in names) + len(names) - 1  # one line feed between files


def _check_length(spec: JobSpec, num_train_bytes: int, num_evaluation_bytes: int) -> None:
    wanted = spec.training.sequence_length
    for part, num_bytes in (("training", num_train_bytes), ("evaluation", num_evaluation_bytes)):
        if num_bytes <= wanted:
            _refuse(
                "training.sequence_length",
                str(wanted),
                f"less than the {part} text of {spec.data.path}, which has {num_bytes} bytes",
                "Shorten training.sequence_length, add text, or change data.evaluation_fraction.",
            )


def _words(error: OSError | RuntimeError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _refuse(field: str, got: str, allowed: str, change: str) -> NoReturn:
    raise InvalidRequest.of((Violation(field=field, got=got, allowed=allowed, message=change),))
