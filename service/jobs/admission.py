"""What can be known of a job at submission and needs this server to know it: its pool, its slots, its data, and
the folder of its model.

A source's own contract (`api_schemas/data/`) reads the files as the workers will, with bounds; where they may lie is decided
here. Raises InvalidRequest with one violation; returns nothing.
"""

import difflib
import os
from pathlib import Path
from typing import NoReturn

import anyio
from anyio.to_thread import run_sync

from api_schemas import FamilySizes, ImageInput, JobSpec, Needs, Unfit, Violation, misfit
from api_schemas.data.files import NEVER_READ, Files
from service.errors import EntrypointNotAllowed, InvalidRequest, NotReady
from service.settings import Settings

CHECKS_AT_ONCE = 4
FILES_TO_READ = "files that the service can read"
UNKNOWN_VOCAB_SIZE = 1 << 32
"""The vocabulary of a model whose configuration does not say it: any data fits, and the rank checks."""


class Admission:
    """Checks jobs in threads of its own, a few at once, so that slow checks hold up no other request."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._threads = anyio.CapacityLimiter(CHECKS_AT_ONCE)

    async def check(self, spec: JobSpec) -> None:
        """Check as `check` does. Raises NotReady if no thread is free in the time that a check may take."""
        longest_wait_s = self._settings.data_check_timeout_s
        try:
            self._threads.acquire_nowait()
        except anyio.WouldBlock:
            try:
                with anyio.fail_after(longest_wait_s):
                    await self._threads.acquire()
            except TimeoutError:
                raise NotReady(
                    f"{CHECKS_AT_ONCE} jobs are being checked and no turn came in {longest_wait_s:g} s; try again"
                ) from None
        try:
            await run_sync(check, spec, self._settings, limiter=_one_thread())
        finally:
            self._threads.release()


def _one_thread() -> anyio.CapacityLimiter:
    """Let a caller that already has its turn have a thread at once."""
    return anyio.CapacityLimiter(1)


def check(spec: JobSpec, settings: Settings) -> None:
    """Raise InvalidRequest for a job that could not run here."""
    _check_pool(spec, settings)
    if unfit := spec.without_effect():
        _refuse(unfit.field, unfit.got, unfit.allowed, unfit.change)
    files = settings.readable_files
    takes = _checked_model(spec, files).takes
    if spec.data.is_stored:
        _check_stored(spec, settings)
        return
    path = _readable_path("data.path", spec.data.path, files)
    if isinstance(takes, ImageInput):
        needs = Needs(spec.training.sequence_length, 0, takes)
    else:
        needs = Needs(spec.training.sequence_length, takes.vocab_size or UNKNOWN_VOCAB_SIZE)
    try:
        spec.data.with_model(spec.model.files).check(path, needs, files)
    except Unfit as unfit:
        _refuse(unfit.field, unfit.got, unfit.allowed, unfit.change)
    except OSError as error:
        _refuse("data.path", _name_in(error, path), FILES_TO_READ, f"{_words(error)}. Make it readable or exclude it.")


def _check_stored(spec: JobSpec, settings: Settings) -> None:
    """Compare the data's URL with the allowed prefixes, without a connection; ranks check what lies there."""
    try:
        settings.store_access.require(spec.data.path)
        spec.data.with_model(spec.model.files).check_local_parts(settings.readable_files)
    except Unfit as unfit:
        _refuse(unfit.field, unfit.got, unfit.allowed, unfit.change)
    except OSError as error:
        _refuse("data", _name_in(error, Path(spec.data.path)), FILES_TO_READ, f"{_words(error)}. Make it readable.")


def _checked_model(spec: JobSpec, files: Files) -> FamilySizes:
    """Return the model's sizes, with what its files say, once they fit the data."""
    if spec.model.files is None:
        return spec.model.sizes
    path = _readable_path("model.path", spec.model.files, files)
    try:
        sizes = spec.model.read_sizes(files)
    except Unfit as unfit:
        _refuse(unfit.field, unfit.got, unfit.allowed, unfit.change)
    except OSError as error:
        _refuse("model.path", _name_in(error, path), FILES_TO_READ, f"{_words(error)}. Make it readable.")
    if misfitting := misfit(sizes.takes, spec.data, spec.training.sequence_length):
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
