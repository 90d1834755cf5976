"""Decides which jobs run next, and says in words and numbers why the others wait. Pure: facts in, decisions out.

A job takes all its slots at once or none; an elastic job takes as many as it may have and are free. Within a pool the order is
strict. Jobs go by priority. If several tenants have jobs of the highest priority, the one is next that has the fewest slots for
its share, and of equal ones the one whose last start is longest ago. Within a tenant jobs go by age.

A job that does not fit holds back the jobs behind it, so that small jobs cannot starve a large one. They may borrow slots which
it cannot use yet: they start, and make way once it fits with what is free and what was lent. In a pool that preempts, attempts
of lower priorities make way for it as well. A job that its tenant's limit or quota holds back does so to that tenant's jobs
alone. A job that cannot run yet for a reason of its own (it backs off, or its last attempt may still be alive) is passed over
and holds back no other job.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from octet.api_schemas import FailureReason
from octet.api_schemas.resources import TenantConfig
from octet.service.scheduling.quotas import Storage, hours_reason, storage_reason
from octet.service.store.queue import Loan, QueuedJob, Use

WAITS_FOR_PLAN = "the memory that it takes is being planned; others are placed meanwhile"


@dataclass(frozen=True)
class PoolState:
    """The slots of a pool: configured, present (None until the cluster says), and taken by attempts not yet released.

    needs_plans: it states its devices' memory, so that jobs are planned before they are placed. used: by tenant. loans:
    attempts that make way when they are asked to. leaving: slots of attempts that end. storage: of tenants whose is limited.
    without_device: slots that nodes offer and have no device for.
    """

    name: str
    slots: int
    slots_present: int | None
    used: Mapping[str, Use] = field(default_factory=dict)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    needs_plans: bool = False
    backfills: bool = True
    loans: tuple[Loan, ...] = ()
    leaving: int = 0
    storage: Mapping[str, Storage] = field(default_factory=dict)
    without_device: int = 0

    @property
    def slots_free(self) -> int:
        return max(0, self._balance)

    @property
    def slots_owed(self) -> int:
        """The slots that attempts hold beyond those which are there: released ones are not free before these are."""
        return max(0, -self._balance)

    @property
    def _balance(self) -> int:
        return min(self.slots, self.slots_present or 0) - sum(use.slots for use in self.used.values())


@dataclass(frozen=True)
class Space:
    """The space that is free where checkpoints are written, and that a job needs which has found the disk full."""

    free_bytes: int
    needed_bytes: int


@dataclass(frozen=True)
class Decision:
    """The decision about one job. `position` counts from 1 within the pool; `why` says why it waits, or is None if it starts.

    workers: ranks that it starts with. free: slots that the pool had for it. `holds_back` is true for the job for which all
    others behind it wait, unless they have a reason of their own. borrows: it starts on slots that this job cannot use yet.
    reclaims: the attempts that have to make way for a job which fits then. missing: the slots that have to come back for it and
    for all that are ahead of it and wait for slots; 0 if it starts, None if it waits for something else.
    """

    job_id: str
    pool: str
    position: int
    why: str | None
    workers: int | None = None
    free: int | None = None
    holds_back: bool = False
    borrows: bool = False
    reclaims: tuple[Loan, ...] = ()
    missing: int | None = None


def decide(
    queue: Iterable[QueuedJob], pools: Iterable[PoolState], now: datetime, lease_grace_s: float, space: Space | None = None
) -> list[Decision]:
    """Decide about every queued job, in the order in which they would start.

    A former attempt is certainly over `lease_grace_s` after its lease ends, because by then it has stopped itself. A job
    that has found the disk full waits for `space`; where that is unknown (None), only its back-off holds it.
    """
    by_pool: dict[str, list[QueuedJob]] = {}
    for job in sorted(queue, key=lambda job: (-job.priority, job.id)):
        by_pool.setdefault(job.pool, []).append(job)
    states = {pool.name: pool for pool in pools}
    return [
        decision
        for name, jobs in by_pool.items()
        for decision in _decide_pool(jobs, states.get(name), now, timedelta(seconds=lease_grace_s), space)
    ]


def _decide_pool(
    jobs: list[QueuedJob], pool: PoolState | None, now: datetime, lease_grace: timedelta, space: Space | None
) -> Iterator[Decision]:
    free = pool.slots_free if pool else 0
    ahead: _Ahead | None = None
    demand = pool.slots_owed if pool else 0
    for position, (job, tenant) in enumerate(_Turns(jobs, pool, now), start=1):
        own_reason = _own_reason(job, now, lease_grace) or _space_reason(job, space) or _plan_reason(job, pool)
        limit_reason = None if own_reason or pool is None else tenant.limit_reason(job, pool.name)
        why = own_reason or limit_reason or _pool_reason(job, pool, free, ahead)
        if why is None:
            spare = free if ahead is None else ahead.spare(free)
            workers = most_of(job.worker_counts, min(spare, tenant.slots_left))
            assert workers is not None
            yield Decision(job.id, job.pool, position, why, workers, free, borrows=ahead is not None, missing=0)
            tenant.take(workers, position)
            free -= workers
            if ahead is not None:
                ahead.lent += workers
            continue
        if limit_reason is not None:
            tenant.blocker = tenant.blocker or job
        elif own_reason is None:
            tenant.wait_for(job.worker_counts[-1], position)
        waits_for_slots = own_reason is None and limit_reason is None
        is_known = pool is not None and pool.slots_present is not None
        if waits_for_slots:
            demand += job.worker_counts[-1]
        missing = max(1, demand - free) if waits_for_slots and is_known else None
        holds_back = waits_for_slots and ahead is None
        reclaims: tuple[Loan, ...] = ()
        if holds_back:
            ahead = _Ahead(job, pool)
            reclaims = ahead.reclaims(free)
        yield Decision(job.id, job.pool, position, why, holds_back=holds_back, reclaims=reclaims, missing=missing)


class _Ahead:
    """The job for which the jobs behind it wait, and the slots that come back to it."""

    def __init__(self, job: QueuedJob, pool: PoolState | None) -> None:
        self.job = job
        self._loans = [loan for loan in pool.loans if loan.makes_way_for(job.priority)] if pool else []
        self.lent = sum(loan.workers for loan in self._loans)
        self._leaving = pool.leaving if pool else 0
        self._lends = pool is not None and pool.backfills

    @property
    def fewest(self) -> int:
        """The slots that it waits for."""
        return self.job.worker_counts[-1]

    def spare(self, free: int) -> int:
        """Return how many of the free slots jobs behind it may borrow.

        All, while it would not fit even with those that come back; else those that it leaves over.
        """
        if not self._lends:
            return 0
        without_loans = free + self._leaving - self.fewest
        return free if without_loans + self.lent < 0 else min(free, max(0, without_loans))

    def reclaims(self, free: int) -> tuple[Loan, ...]:
        """Return the attempts that make way for it: none, as long as it would not fit with the slots of all of them."""
        missing = self.fewest - free - self._leaving
        return tuple(to_reclaim(self._loans, missing)) if 0 < missing <= self.lent else ()


def to_reclaim(loans: Iterable[Loan], short: int) -> list[Loan]:
    """Choose the attempts that make way, so that at least `short` slots come back: in their order, and none without need."""
    chosen: list[Loan] = []
    for loan in loans:
        if sum(each.workers for each in chosen) < short:
            chosen.append(loan)
    for loan in list(chosen):
        if sum(each.workers for each in chosen) - loan.workers >= short:
            chosen.remove(loan)
    return chosen


def quota_reason(pool: PoolState, tenant: str, now: datetime) -> str | None:
    """Say why no job of a tenant starts in a pool: its slot hours of the month, or its storage. None if there are some left."""
    most = pool.tenants.get(tenant, TenantConfig()).slot_hours_per_month
    hours = pool.used.get(tenant, Use()).hours
    return hours_reason(tenant, pool.name, hours, most, now) or storage_reason(tenant, pool.storage.get(tenant))


class _Tenant:
    """The jobs of one tenant in the queue of a pool, in their order, and what it takes of the pool."""

    def __init__(self, name: str, jobs: Iterable[QueuedJob], pool: PoolState | None, now: datetime) -> None:
        self._name = name
        self.jobs = deque(jobs)
        config = pool.tenants.get(name) if pool else None
        use = pool.used.get(name, Use()) if pool else Use()
        self._config = config or TenantConfig()
        self._slots, self._num_jobs = use.slots, use.jobs
        self._slots_with_waiting = self._slots
        # Without it, the small jobs of one tenant could start each time when a pool is empty, and a large one of another never.
        self._last_turn = (0, 0.0 if use.started_at is None else use.started_at.timestamp())
        self.blocker: QueuedJob | None = None
        self._quota_reason = None if pool is None else quota_reason(pool, name, now)

    @property
    def turn(self) -> tuple[bool, int, float, tuple[int, float], str]:
        """Sort the tenants by this: the least one's next job is next."""
        job = self.jobs[0]
        of_share = self._slots_with_waiting / self._config.share
        return self.blocker is not None, -job.priority, of_share, self._last_turn, job.id

    @property
    def slots_left(self) -> int | float:
        """The slots that it may still take by its limit."""
        return math.inf if self._config.slots is None else max(0, self._config.slots - self._slots)

    def take(self, slots: int, position: int) -> None:
        """Count a job that starts."""
        self._slots += slots
        self._num_jobs += 1
        self.wait_for(slots, position)

    def wait_for(self, slots: int, position: int) -> None:
        """Count a job that waits for slots, for the turns alone: the order shown is that in which jobs will start."""
        self._slots_with_waiting += slots
        self._last_turn = (1, position)

    def limit_reason(self, job: QueuedJob, pool: str) -> str | None:
        of_pool = f"in pool {pool!r}"
        if self._quota_reason is not None:
            return self._quota_reason
        if self.blocker is not None:
            return f"{self.blocker.id} of the same tenant is ahead {of_pool} and waits for the tenant's limit"
        if self._config.jobs is not None and self._num_jobs >= self._config.jobs:
            return f"tenant {self._name!r} has {self._num_jobs} jobs {of_pool}, which is its limit"
        fewest = job.worker_counts[-1]
        if fewest > self.slots_left:
            taken = f"{self._slots} of the {self._config.slots}"
            return (
                f"needs {fewest} slot{'s' if fewest > 1 else ''}; tenant {self._name!r} has {taken} that it may take {of_pool}"
            )
        return None


class _Turns:
    """The jobs of a pool in the order of the tenants' turns, which depends on what was decided about the jobs before."""

    def __init__(self, jobs: Iterable[QueuedJob], pool: PoolState | None, now: datetime) -> None:
        by_tenant: dict[str, list[QueuedJob]] = {}
        for job in jobs:
            by_tenant.setdefault(job.tenant, []).append(job)
        self._waiting = [_Tenant(name, own, pool, now) for name, own in by_tenant.items()]

    def __iter__(self) -> Iterator[tuple[QueuedJob, _Tenant]]:
        while self._waiting:
            tenant = min(self._waiting, key=lambda each: each.turn)
            yield tenant.jobs.popleft(), tenant
            if not tenant.jobs:
                self._waiting.remove(tenant)


def most_of(worker_counts: tuple[int, ...], free: float) -> int | None:
    """Return the largest of the numbers of ranks that an attempt may have for which there are slots. None: there is none."""
    return next((count for count in worker_counts if count <= free), None)


def is_worth_growing(workers: int, larger: int, remaining_s: float | None, start_s: float) -> bool:
    """Return True if an attempt with more ranks is done before this one, though it has to start first.

    It trains faster by the ratio of the ranks at most. remaining_s: None while no step was measured, which decides nothing.
    start_s: the time that the present attempt took to start.
    """
    return remaining_s is None or start_s + remaining_s * workers / larger < remaining_s


def _own_reason(job: QueuedJob, now: datetime, lease_grace: timedelta) -> str | None:
    if job.former_attempt_at_large:
        lease_ends = job.former_lease_expires_at
        if lease_ends is None or now <= lease_ends + lease_grace:
            return "its last attempt is not certain to be over; its processes are being stopped"
    if job.not_before is not None and job.not_before > now:
        return f"backs off after a failure, for another {(job.not_before - now).total_seconds():.0f} s"
    return None


def _space_reason(job: QueuedJob, space: Space | None) -> str | None:
    if job.former_reason is not FailureReason.STORAGE_FULL or space is None or space.free_bytes >= space.needed_bytes:
        return None
    return (
        f"found the disk full; {space.free_bytes >> 20} MiB are free there and {space.needed_bytes >> 20} MiB have to be. "
        "Ask the operator to free space"
    )


def waits_for_plan(job: QueuedJob, pool: PoolState | None) -> bool:
    """Return True for a job that is planned before it is placed, and has no plan yet."""
    return pool is not None and pool.needs_plans and not job.is_planned


def _plan_reason(job: QueuedJob, pool: PoolState | None) -> str | None:
    return WAITS_FOR_PLAN if waits_for_plan(job, pool) else None


def _pool_reason(job: QueuedJob, pool: PoolState | None, free: int, ahead: _Ahead | None) -> str | None:
    if pool is None:
        return f"pool {job.pool!r} is not configured any more; ask the operator"
    if pool.slots_present is None:
        return f"the cluster has not yet said what pool {pool.name!r} has"
    there, lacks = min(pool.slots, pool.slots_present), ""
    if pool.without_device:
        lacks = f" ({pool.without_device} of {pool.slots} are on nodes that have no GPU for them; ask the operator)"
    if ahead is not None:
        if most_of(job.worker_counts, ahead.spare(free)) is not None:
            return None
        name = ahead.job.id if ahead.job.tenant == job.tenant else "of another tenant"
        return f"behind a job that needs {_slots_of(ahead.job, pool)}; {free} of {there} are free{lacks}. It is {name}"
    if most_of(job.worker_counts, free) is None:
        missing = "" if there == pool.slots else f" ({pool.slots - there} of {pool.slots} are away)"
        return f"needs {_slots_of(job, pool)}; {free} of {there} are free{lacks or missing}"
    return None


def _slots_of(job: QueuedJob, pool: PoolState) -> str:
    """Write the fewest slots with which a job starts."""
    fewest = job.worker_counts[-1]
    return f"{fewest} slot{'s' if fewest > 1 else ''} of pool {pool.name!r}"
