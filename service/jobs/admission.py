"""Check what this server alone can know of a job at submission: its pool, its slots, its data, and its model's folder.

What needs files is checked by `file_checks`, in processes with limits of memory and time. Raises InvalidRequest with one
violation; returns nothing.
"""

import asyncio
import difflib
import time
from collections.abc import Hashable
from typing import NamedTuple

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from octet.api_schemas import JobSpec, Violation
from octet.api_schemas.plan import why_not_traced
from octet.api_schemas.rules.table import check_without_effect
from octet.service.errors import EntrypointNotAllowed
from octet.service.jobs.check_processes import CheckProcesses
from octet.service.jobs.file_checks import Inputs, check_files, inputs_of, refuse
from octet.service.jobs.planning import why_no_peaks
from octet.service.jobs.turns import FairTurns
from octet.service.settings import Settings

CHECKS_AT_ONCE = 8
CHECKS_OF_TENANT = 4
MOST_WAITING_OF_TENANT = 256
PASSED_S = 1.0
"""The time after a check was asked for in which it counts for jobs of a tenant with the same inputs, as those of a sweep."""
_MOST_KEPT = 256


class _Checking(NamedTuple):
    """A check of files for all jobs with the same inputs. It counts from when it was asked for."""

    since_s: float
    task: "asyncio.Task[None]"


class Admission:
    """Checks jobs, their files in other processes, a few at once and of each tenant fewer.

    Slow checks hold up no other request, and those of one tenant no check of another.
    For a short while a check counts for all jobs of a tenant with the same inputs: files may change after any
    check. So the jobs of a sweep have a few checks each second, not hundreds.
    """

    def __init__(self, settings: Settings, processes: CheckProcesses) -> None:
        self._settings, self._processes = settings, processes
        self._turns = FairTurns(CHECKS_AT_ONCE, CHECKS_OF_TENANT, MOST_WAITING_OF_TENANT)
        self._threads = CapacityLimiter(CHECKS_AT_ONCE)
        self._checking: dict[Hashable, _Checking] = {}

    async def check(self, spec: JobSpec, tenant: str) -> None:
        """Check a job of a tenant. Raises InvalidRequest, NotReady if no turn comes in time, and TooManyRequests."""
        check_options(spec, self._settings)
        _check_limits(spec, tenant, self._settings)
        inputs = inputs_of(spec)
        key, now_s = (tenant, inputs.key), time.monotonic()
        checking = self._checking.get(key)
        if checking is None or now_s - checking.since_s >= PASSED_S or _has_failed(checking.task):
            if len(self._checking) >= _MOST_KEPT:
                self._checking.clear()
            checking = self._checking[key] = _Checking(now_s, asyncio.create_task(self._check_files(inputs, tenant)))
        if not checking.task.done():
            await asyncio.wait([checking.task])  # a request that goes away ends no check of others
        checking.task.result()

    async def _check_files(self, inputs: Inputs, tenant: str) -> None:
        async with self._turns.turn(tenant, self._settings.data_check_timeout_s):
            await run_sync(self._check_in_process, inputs, limiter=self._threads)

    def _check_in_process(self, inputs: Inputs) -> None:
        self._processes.check(inputs, self._settings.readable_files)


def _has_failed(task: "asyncio.Task[None]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def check(spec: JobSpec, settings: Settings) -> None:
    """Raise InvalidRequest for a job that could not run here."""
    check_options(spec, settings)
    check_files(inputs_of(spec), settings.readable_files)


def check_options(spec: JobSpec, settings: Settings) -> None:
    """Check what needs no file, in no time."""
    _check_pool(spec, settings)
    _check_level(spec, settings)
    if conflict := check_without_effect(spec):
        refuse(conflict.field, conflict.got, conflict.allowed, conflict.change)


def _check_limits(spec: JobSpec, tenant: str, settings: Settings) -> None:
    """Refuse a job that takes more slots than its tenant may ever have of the pool."""
    wanted, pool = spec.resources, settings.pool(spec.resources.pool)
    limit = None if pool is None else pool.of_tenant(tenant).slots
    fewest = spec.worker_counts[-1]
    if limit is not None and fewest > limit:
        field = "resources.workers" if wanted.min_workers is None else "resources.min_workers"
        refuse(
            field,
            str(fewest),
            f"at most {limit}, the slots of pool {wanted.pool!r} that tenant {tenant!r} may take",
            f"Lower {field}, choose another pool, or ask the operator for a higher limit.",
        )


def _check_pool(spec: JobSpec, settings: Settings) -> None:
    wanted, names = spec.resources, [pool.name for pool in settings.pools]
    pool = settings.pool(wanted.pool)
    if pool is None:
        close = difflib.get_close_matches(wanted.pool, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        refuse("resources.pool", wanted.pool, ", ".join(names), f"no such pool.{hint} Change resources.pool.")
    if wanted.workers > pool.slots:
        refuse(
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
        refuse("precision.level", f"auto in pool {pool.name}", f"auto in pools with memory_per_device_bytes: {stating}", change)
    if reason := why_no_peaks(settings) or why_not_traced(spec):
        refuse("precision.level", "auto", f"auto where a job's peak can be planned; {reason}", "Name a level.")
