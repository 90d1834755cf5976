"""Check what this server alone can know of a job at submission: its pool, its slots, its data, and its model's folder.

A source's own contract (`api_schemas/data/`) reads the files as the workers will, with bounds; where they may lie is decided
here. Raises InvalidRequest with one violation; returns nothing.
"""

import asyncio
import difflib
import os
import time
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple, NoReturn

from anyio import CapacityLimiter, move_on_after
from anyio.to_thread import run_sync

from octet.api_schemas import DataSpec, FamilySizes, ImageInput, JobSpec, ModelSpec, Needs, SpecConflict, Violation, check_data
from octet.api_schemas.data.files import NEVER_READ, Files, outside_of_roots
from octet.api_schemas.plan import why_not_traced
from octet.api_schemas.rules.table import check_without_effect
from octet.service.errors import EntrypointNotAllowed, InvalidRequest, NotReady
from octet.service.jobs.planning import why_no_peaks
from octet.service.settings import Settings

CHECKS_AT_ONCE = 4
PASSED_S = 0.1
"""The time after a check was asked for in which it counts for jobs with the same inputs, as those of a sweep."""
_MOST_KEPT = 256
FILES_TO_READ = "files that the service can read"
UNKNOWN_VOCAB_SIZE = 1 << 32
"""The vocabulary of a model whose configuration does not say it: any data fits, and the rank checks."""


class _Checking(NamedTuple):
    """A check of files for all jobs with the same inputs. It counts from when it was asked for."""

    since_s: float
    task: "asyncio.Task[None]"


class Admission:
    """Checks jobs, their files in threads of its own, a few at once, so that slow checks hold up no other request.

    For a short while a check counts for all jobs with the same inputs: files may change after any
    check. So the jobs of a sweep have a few checks each second, not hundreds.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._turns, self._threads = CapacityLimiter(CHECKS_AT_ONCE), CapacityLimiter(CHECKS_AT_ONCE)
        self._checking: dict[Hashable, _Checking] = {}

    async def check(self, spec: JobSpec) -> None:
        """Check as `check` does. Raises NotReady if no thread is free in the time that a check may take."""
        check_options(spec, self._settings)
        inputs = inputs_of(spec)
        key, now_s = inputs.key, time.monotonic()
        checking = self._checking.get(key)
        if checking is None or now_s - checking.since_s >= PASSED_S or _has_failed(checking.task):
            if len(self._checking) >= _MOST_KEPT:
                self._checking.clear()
            checking = self._checking[key] = _Checking(now_s, asyncio.create_task(self._check_files(inputs)))
        if not checking.task.done():
            await asyncio.wait([checking.task])  # a request that goes away ends no check of others
        checking.task.result()

    async def _check_files(self, inputs: "Inputs") -> None:
        borrower, longest_wait_s = object(), self._settings.data_check_timeout_s
        with move_on_after(longest_wait_s) as waiting:
            await self._turns.acquire_on_behalf_of(borrower)
        if waiting.cancelled_caught:
            raise NotReady(f"{CHECKS_AT_ONCE} jobs are being checked and no turn came in {longest_wait_s:g} s; try again")
        try:
            await run_sync(check_files, inputs, self._settings, limiter=self._threads)
        finally:
            self._turns.release_on_behalf_of(borrower)


def _has_failed(task: "asyncio.Task[None]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class Inputs(NamedTuple):
    """The inputs of a job, and how it reads them: all that the check of its files depends on."""

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
    _check_level(spec, settings)
    if conflict := check_without_effect(spec):
        _refuse(conflict.field, conflict.got, conflict.allowed, conflict.change)


def check_limits(spec: JobSpec, tenant: str, settings: Settings) -> None:
    """Refuse a job that takes more slots than its tenant may ever have of the pool."""
    wanted, pool = spec.resources, settings.pool(spec.resources.pool)
    limit = None if pool is None else pool.of_tenant(tenant).slots
    fewest = spec.worker_counts[-1]
    if limit is not None and fewest > limit:
        field = "resources.workers" if wanted.min_workers is None else "resources.min_workers"
        _refuse(
            field,
            str(fewest),
            f"at most {limit}, the slots of pool {wanted.pool!r} that tenant {tenant!r} may take",
            f"Lower {field}, choose another pool, or ask the operator for a higher limit.",
        )


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
    except SpecConflict as conflict:
        _refuse(conflict.field, conflict.got, conflict.allowed, conflict.change)
    except OSError as error:
        _refuse("data.path", _name_in(error, path), FILES_TO_READ, f"{_words(error)}. Make it readable or exclude it.")


def _check_stored(inputs: Inputs, settings: Settings) -> None:
    """Compare the data's URL with the allowed prefixes, without a connection; ranks check what lies there."""
    data = inputs.data
    try:
        settings.store_access.require(data.path)
        data.with_model(inputs.model.files).check_local_parts(settings.readable_files)
    except SpecConflict as conflict:
        _refuse(conflict.field, conflict.got, conflict.allowed, conflict.change)
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
        model.check_weights(files)
    except SpecConflict as conflict:
        _refuse(conflict.field, conflict.got, conflict.allowed, conflict.change)
    except OSError as error:
        _refuse("model.path", _name_in(error, path), FILES_TO_READ, f"{_words(error)}. Make it readable.")
    if found := check_data(sizes.takes, inputs.data, inputs.sequence_length):
        _refuse(found.field, found.got, found.allowed, found.change)
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
    if spec.model.sizes.capabilities.users_code and not pool.allows_entrypoints:
        allowing = ", ".join(pool.name for pool in settings.pools if pool.allows_entrypoints) or "none of this server's"
        raise EntrypointNotAllowed.of(
            (
                Violation(
                    field="model.entrypoint",
                    got=f"{spec.model.title} in pool {pool.name}",
                    allowed=f"pools whose operator sets allows_entrypoints: {allowing}",
                    message="Change resources.pool, or have the operator allow it.",
                ),
            )
        )


def _check_level(spec: JobSpec, settings: Settings) -> None:
    """Refuse level auto where no level could be chosen by what it takes."""
    if spec.precision.is_resolved:
        return
    pool = settings.pool(spec.resources.pool)
    if pool is not None and not pool.plans_jobs:
        stating = ", ".join(pool.name for pool in settings.pools if pool.plans_jobs) or "none of this server's"
        change = "Name a level, choose such a pool, or have the operator state the memory of this one."
        _refuse(
            "precision.level", f"auto in pool {pool.name}", f"auto in pools with memory_per_device_bytes: {stating}", change
        )
    if reason := why_no_peaks(settings) or why_not_traced(spec):
        _refuse("precision.level", "auto", f"auto where a job's peak can be planned; {reason}", "Name a level.")


def _readable_path(field: str, asked: str, files: Files) -> Path:
    """Resolve the links of a path. The refusal of a path outside the allowed folders does not say what is there."""
    try:
        path = Path(asked).resolve()
    except (OSError, RuntimeError) as error:
        _refuse(field, asked, "a path that can be resolved", f"Change {field}: {_words(error)}.")
    roots = files.roots or ()
    if any(_is_inside(path, never) for never in NEVER_READ) or not any(_is_inside(path, root) for root in roots):
        conflict = outside_of_roots(field, asked, roots)
        _refuse(conflict.field, conflict.got, conflict.allowed, conflict.change)
    try:
        is_there = path.is_file() or path.is_dir()
    except OSError as error:
        _refuse(field, asked, "a path that can be read", f"Change {field}: {_words(error)}.")
    if not is_there:
        change = f"Nothing of that kind is there, though jobs may read in that place. Correct {field}, or put the data there."
        _refuse(field, asked, "a file or folder that exists where the server runs", change)
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
