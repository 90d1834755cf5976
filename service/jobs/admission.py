"""What can be known of a job at submission and needs this server to know it: its pool, its slots, its data, and
the folder of its model.

A source's own contract (`api_schemas/data/`) reads the files as the workers will, with bounds; where they may lie is decided
here. Raises InvalidRequest with one violation; returns nothing.
"""

import asyncio
import difflib
import math
import os
import time
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple, NoReturn

from api_schemas import DataSpec, FamilySizes, ImageInput, JobSpec, ModelSpec, Needs, Unfit, Violation, misfit
from api_schemas.data.files import NEVER_READ, Files
from service.errors import EntrypointNotAllowed, InvalidRequest, NotReady
from service.jobs.check_threads import CheckThreads, Overdue
from service.settings import Settings

CHECKS_AT_ONCE = 4
PASSED_S = 0.1
"""How long after a check began its success holds for jobs with the same inputs, as those of a sweep."""
AGAIN_S = 0.05
"""How long after a check began the next job with the same inputs has it made again, without waiting for it."""
_MOST_PASSED = 256
FILES_TO_READ = "files that the service can read"
UNKNOWN_VOCAB_SIZE = 1 << 32
"""The vocabulary of a model whose configuration does not say it: any data fits, and the rank checks."""


class Admission:
    """Checks jobs, their files in threads of its own, a few at once, so that slow checks hold up no other request."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._threads = CheckThreads(CHECKS_AT_ONCE)
        self._passed_at_s: dict[Hashable, float] = {}
        self._again: dict[Hashable, asyncio.Task[None]] = {}

    async def check(self, spec: JobSpec) -> None:
        """Check as `check` does. Raises NotReady if no thread is free in the time that a check may take.

        Files that have just passed for a job with the same inputs are not read again: they may change after any check.
        """
        check_options(spec, self._settings)
        inputs = inputs_of(spec)
        key = inputs.key
        if self._has_passed(key, inputs):
            return
        try:
            await self._check_files(key, inputs)
        except Overdue:
            longest_wait_s = self._settings.data_check_timeout_s
            raise NotReady(
                f"{CHECKS_AT_ONCE} jobs are being checked and no turn came in {longest_wait_s:g} s; try again"
            ) from None

    def passes_now(self, spec: JobSpec) -> bool:
        """Return True if `check` would return without waiting. False says nothing: the job has to be checked."""
        try:
            check_options(spec, self._settings)
        except InvalidRequest:
            return False
        inputs = inputs_of(spec)
        return self._has_passed(inputs.key, inputs)

    def _has_passed(self, key: Hashable, inputs: "Inputs") -> bool:
        """Return True if these files have just passed. Before that is too long ago they are checked again."""
        age_s = time.monotonic() - self._passed_at_s.get(key, -math.inf)
        if age_s >= PASSED_S:
            return False
        if age_s >= AGAIN_S and key not in self._again:
            self._again[key] = asyncio.create_task(self._check_again(key, inputs))
        return True

    async def _check_files(self, key: Hashable, inputs: "Inputs") -> None:
        began_s = time.monotonic()
        await self._threads.run(key, lambda: check_files(inputs, self._settings), self._settings.data_check_timeout_s)
        if len(self._passed_at_s) >= _MOST_PASSED:
            self._passed_at_s.clear()
        self._passed_at_s[key] = began_s

    async def _check_again(self, key: Hashable, inputs: "Inputs") -> None:
        """Check ahead of time, so that the jobs of a sweep need not wait for it. If it fails, the next job checks itself."""
        try:
            await self._check_files(key, inputs)
        except Exception:  # noqa: BLE001  whatever it is, the next job with these inputs is told
            self._passed_at_s.pop(key, None)
        finally:
            del self._again[key]


class Inputs(NamedTuple):
    """What a job reads, and how: all that the check of its files knows of it."""

    model: ModelSpec
    data: DataSpec
    sequence_length: int

    @property
    def key(self) -> Hashable:
        """Equal for jobs that have the same check: those of a sweep, for example."""
        try:
            hash(self)
        except TypeError:  # a model with options of any shape
            return object()
        return self


def inputs_of(spec: JobSpec) -> Inputs:
    """Return what a job reads."""
    return Inputs(spec.model, spec.data, spec.training.sequence_length)


def check(spec: JobSpec, settings: Settings) -> None:
    """Raise InvalidRequest for a job that could not run here."""
    check_options(spec, settings)
    check_files(inputs_of(spec), settings)


def check_options(spec: JobSpec, settings: Settings) -> None:
    """Check what needs no file, in no time."""
    _check_pool(spec, settings)
    if unfit := spec.without_effect():
        _refuse(unfit.field, unfit.got, unfit.allowed, unfit.change)


def check_files(inputs: Inputs, settings: Settings) -> None:
    """Check the files of a job's model and data, which can take as long as a file system does."""
    files = settings.readable_files
    takes, data = _checked_model(inputs, files).takes, inputs.data
    if data.is_stored:
        _check_stored(inputs, settings)
        return
    path = _readable_path("data.path", data.path, files)
    if isinstance(takes, ImageInput):
        needs = Needs(inputs.sequence_length, 0, takes)
    else:
        needs = Needs(inputs.sequence_length, takes.vocab_size or UNKNOWN_VOCAB_SIZE)
    try:
        data.with_model(inputs.model.files).check(path, needs, files)
    except Unfit as unfit:
        _refuse(unfit.field, unfit.got, unfit.allowed, unfit.change)
    except OSError as error:
        _refuse("data.path", _name_in(error, path), FILES_TO_READ, f"{_words(error)}. Make it readable or exclude it.")


def _check_stored(inputs: Inputs, settings: Settings) -> None:
    """Compare the data's URL with the allowed prefixes, without a connection; ranks check what lies there."""
    data = inputs.data
    try:
        settings.store_access.require(data.path)
        data.with_model(inputs.model.files).check_local_parts(settings.readable_files)
    except Unfit as unfit:
        _refuse(unfit.field, unfit.got, unfit.allowed, unfit.change)
    except OSError as error:
        _refuse("data", _name_in(error, Path(data.path)), FILES_TO_READ, f"{_words(error)}. Make it readable.")


def _checked_model(inputs: Inputs, files: Files) -> FamilySizes:
    """Return the model's sizes, with what its files say, once they fit the data."""
    model = inputs.model
    if model.files is None:
        return model.sizes
    path = _readable_path("model.path", model.files, files)
    try:
        sizes = model.read_sizes(files)
    except Unfit as unfit:
        _refuse(unfit.field, unfit.got, unfit.allowed, unfit.change)
    except OSError as error:
        _refuse("model.path", _name_in(error, path), FILES_TO_READ, f"{_words(error)}. Make it readable.")
    if misfitting := misfit(sizes.takes, inputs.data, inputs.sequence_length):
        _refuse(misfitting.field, misfitting.got, misfitting.allowed, misfitting.change)
    return sizes


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
    if spec.model.family == "python" and not pool.allows_entrypoints:
        allowing = ", ".join(pool.name for pool in settings.pools if pool.allows_entrypoints) or "none of this server's"
        raise EntrypointNotAllowed.of(
            (
                Violation(
                    field="model.entrypoint",
                    got=f"{spec.model.entrypoint} in pool {pool.name}",
                    allowed=f"pools whose operator sets allows_entrypoints: {allowing}",
                    message="Change resources.pool, or have the operator allow it.",
                ),
            )
        )


def _readable_path(field: str, asked: str, files: Files) -> Path:
    """Resolve the links of a path. The refusal of a path outside the allowed folders does not say what is there."""
    try:
        path = Path(asked).resolve()
    except (OSError, RuntimeError) as error:
        _refuse(field, asked, "a path that can be resolved", f"Change {field}: {_words(error)}.")
    roots = files.roots or ()
    if any(_is_inside(path, never) for never in NEVER_READ) or not any(_is_inside(path, root) for root in roots):
        allowed = f"a file or folder inside {', '.join(roots)}, and never {', '.join(NEVER_READ)}"
        _refuse(field, asked, allowed, f"Change {field}, or have the operator add its folder to the data roots.")
    try:
        is_there = path.is_file() or path.is_dir()
    except OSError as error:
        _refuse(field, asked, "a path that can be read", f"Change {field}: {_words(error)}.")
    if not is_there:
        _refuse(field, asked, "a file or folder that exists", f"Nothing of that kind is there. Change {field}.")
    if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        _refuse(field, asked, "a path that the service can read", f"Change its permissions or {field}.")
    return path


def _is_inside(path: Path, folder: str) -> bool:
    """Return True for a resolved path that is the folder or below it."""
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _name_in(error: OSError, path: Path) -> str:
    return os.fsencode(error.filename or path).decode("utf-8", "backslashreplace")


def _words(error: OSError | RuntimeError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _refuse(field: str, got: str, allowed: str, change: str) -> NoReturn:
    raise InvalidRequest.of((Violation(field=field, got=got, allowed=allowed, message=change),))
