"""Check what this server alone can know of a job at submission: its pool, its slots, its data, and its model's folder.

What needs files is checked by `file_checks`, in processes with limits of memory and time. Raises InvalidRequest with one
violation; returns nothing.
"""

import asyncio
import difflib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import NamedTuple

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from octet.api_schemas import ExportSpec, JobSpec, SpecConflict, Violation
from octet.api_schemas.plan import why_not_traced
from octet.api_schemas.rules.table import check_without_effect
from octet.service.errors import EntrypointNotAllowed, NotReady, TooManyRequests
from octet.service.jobs.check_processes import CheckProcesses
from octet.service.jobs.file_checks import Inputs, check_files, inputs_of, refuse
from octet.service.jobs.limits import check_cost
from octet.service.jobs.planning import why_no_peaks
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

    async def check(self, spec: JobSpec, tenant: str, most_priority: int) -> None:
        """Check a job of a tenant. most_priority: the highest that may be asked for.

        Raises InvalidRequest, NotReady if no turn comes in time, and TooManyRequests.
        """
        check_options(spec, self._settings)
        check_priority(spec.priority, most_priority)
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
    check_cost(spec.resources.max_cost, spec.resources.pool, settings.slot_hour_prices)
    check_export(spec.export, settings)
    if conflict := check_without_effect(spec):
        refuse(conflict.field, conflict.got, conflict.allowed, conflict.change)


def check_priority(priority: int, most: int) -> None:
    """Refuse a priority above the highest that the caller's role may ask for."""
    if priority > most:
        refuse(
            "priority",
            str(priority),
            f"at most {most} for the role of your key",
            "Lower priority (of a job that is over: clone it), or have somebody with a higher role do this.",
        )


def check_export(export: ExportSpec | None, settings: Settings) -> None:
    """Raise InvalidRequest for an export to a place that the operator does not allow."""
    if export is not None and export.target is not None:
        try:
            settings.store_access.require_export(export.target)
        except SpecConflict as conflict:
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
    if spec.runs_users_code and not pool.allows_entrypoints:
        allowing = ", ".join(pool.name for pool in settings.pools if pool.allows_entrypoints) or "none of this server's"
        raise EntrypointNotAllowed.of(
            (
                Violation(
                    field="evaluation.tasks" if spec.evaluation is not None else "model.entrypoint",
                    got=f"{spec.model.title if spec.evaluation is None else 'tasks, which are code,'} in pool {pool.name}",
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


class FairTurns:
    """The turns of one event loop.

    A free turn goes to the tenant that has the fewest, and among those to the one that waits since the longest-past turn.
    One tenant never has all turns, so another one's first request need not wait for the end of any.
    """

    def __init__(self, at_once: int, of_one: int, most_waiting: int) -> None:
        """of_one: the most turns of one tenant. most_waiting: the most of its requests that wait for one."""
        self._at_once, self._of_one, self._most_waiting = at_once, of_one, most_waiting
        self._taken = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Requests that wait, by tenant; the tenant whose turn is longest past comes first."""

    @asynccontextmanager
    async def turn(self, tenant: str, longest_wait_s: float) -> AsyncIterator[None]:
        """Hold a turn. Raises NotReady if none comes in time, and TooManyRequests if too many requests of the tenant wait."""
        await self._take(tenant, longest_wait_s)
        try:
            yield
        finally:
            self._give_back(tenant)

    async def _take(self, tenant: str, longest_wait_s: float) -> None:
        waiting = self._waiting.setdefault(tenant, deque())
        if len(waiting) >= self._most_waiting:
            message = f"{len(waiting)} jobs of tenant {tenant} wait for the check of their files, as many as may; send it again"
            raise TooManyRequests(message, 1.0)
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        self._share_out()
        try:
            async with asyncio.timeout(longest_wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it came in the same moment
                self._give_back(tenant)
            else:
                waiting.remove(turn)
                self._forget_if_idle(tenant)
            if isinstance(error, TimeoutError):
                num_taken = self._taken.total()
                message = f"{num_taken} jobs are being checked and no turn came in {longest_wait_s:g} s; try again"
                raise NotReady(message) from None
            raise

    def _give_back(self, tenant: str) -> None:
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._share_out()

    def _share_out(self) -> None:
        while self._taken.total() < self._at_once:
            able = [tenant for tenant in self._waiting if self._taken[tenant] < self._of_one]
            if not able:
                return
            tenant = min(able, key=self._taken.__getitem__)
            turns = self._waiting.pop(tenant)
            turns.popleft().set_result(None)
            self._taken[tenant] += 1
            if turns:
                self._waiting[tenant] = turns  # behind all others

    def _forget_if_idle(self, tenant: str) -> None:
        if not self._waiting.get(tenant, True):
            del self._waiting[tenant]
