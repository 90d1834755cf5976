"""Decides which jobs run next, and says in words and numbers why the others wait. Pure: facts in, decisions out.

A job takes all its slots at once or none; an elastic job takes as many as it may have and are free. Within a pool the order is
strict: by priority, then by age. A job that does not fit holds back the jobs behind it, so that small jobs cannot starve a
large one. A job that cannot run yet for a reason of its own (it backs off, or its last attempt may still be alive) is passed
over and holds back no other job.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from octet.api_schemas import FailureReason, PoolConfig

WAITS_FOR_PLAN = "the memory that it takes is being planned; others are placed meanwhile"


class Queued(Protocol):
    """A job in the queue, as the store reads it. Its former attempt is at large until its processes are known to be gone."""

    @property
    def id(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def workers(self) -> int: ...
    @property
    def worker_counts(self) -> tuple[int, ...]: ...
    @property
    def priority(self) -> int: ...
    @property
    def not_before(self) -> datetime | None: ...
    @property
    def former_attempt_at_large(self) -> bool: ...
    @property
    def former_lease_expires_at(self) -> datetime | None: ...
    @property
    def former_reason(self) -> FailureReason | None: ...
    @property
    def is_planned(self) -> bool: ...


@dataclass(frozen=True)
class PoolState:
    """The slots of a pool: configured, present (None until the cluster says), and taken by attempts not yet released.

    needs_plans: it states its devices' memory, so that jobs are planned before they are placed.
    """

    name: str
    slots: int
    slots_present: int | None
    slots_used: int
    needs_plans: bool = False

    @property
    def slots_free(self) -> int:
        return max(0, min(self.slots, self.slots_present or 0) - self.slots_used)


def pool_states(
    pools: Iterable[PoolConfig], slots_present: Mapping[str, int], slots_used: Mapping[str, int]
) -> list[PoolState]:
    """Join the configured pools with the slots that the cluster has and that attempts take."""
    return [
        PoolState(pool.name, pool.slots, slots_present.get(pool.name), slots_used.get(pool.name, 0), pool.plans_jobs)
        for pool in pools
    ]


@dataclass(frozen=True)
class Space:
    """The space that is free where checkpoints are written, and that a job needs which has found the disk full."""

    free_bytes: int
    needed_bytes: int


@dataclass(frozen=True)
class Decision:
    """The decision about one job. `position` counts from 1 within the pool; `why` says why it waits, or is None if it starts.

    workers: ranks that it starts with. free: slots that the pool had for it.
    """

    job_id: str
    position: int
    why: str | None
    workers: int | None = None
    free: int | None = None


def decide(
    queue: Iterable[Queued], pools: Iterable[PoolState], now: datetime, lease_grace_s: float, space: Space | None = None
) -> list[Decision]:
    """Decide about every queued job, in the order in which they would start.

    A former attempt is certainly over `lease_grace_s` after its lease ends, because by then it has stopped itself. A job
    that has found the disk full waits for `space`; where that is unknown (None), only its back-off holds it.
    """
    by_pool: dict[str, list[Queued]] = {}
    for job in sorted(queue, key=lambda job: (-job.priority, job.id)):
        by_pool.setdefault(job.pool, []).append(job)
    states = {pool.name: pool for pool in pools}
    return [
        decision
        for name, jobs in by_pool.items()
        for decision in _decide_pool(jobs, states.get(name), now, timedelta(seconds=lease_grace_s), space)
    ]


def _decide_pool(
    jobs: list[Queued], pool: PoolState | None, now: datetime, lease_grace: timedelta, space: Space | None
) -> Iterator[Decision]:
    free = pool.slots_free if pool else 0
    blocker: Queued | None = None
    for position, job in enumerate(jobs, start=1):
        own_reason = _own_reason(job, now, lease_grace) or _space_reason(job, space) or _plan_reason(job, pool)
        why = own_reason or _pool_reason(job, pool, free, blocker)
        if why is None:
            workers = most_of(job.worker_counts, free)
            assert workers is not None
            yield Decision(job.id, position, why, workers, free)
            free -= workers
            continue
        if own_reason is None and blocker is None:
            blocker = job
        yield Decision(job.id, position, why)


def most_of(worker_counts: tuple[int, ...], free: int) -> int | None:
    """Return the largest of the numbers of ranks that an attempt may have for which there are slots. None: there is none."""
    return next((count for count in worker_counts if count <= free), None)


def _own_reason(job: Queued, now: datetime, lease_grace: timedelta) -> str | None:
    if job.former_attempt_at_large:
        lease_ends = job.former_lease_expires_at
        if lease_ends is None or now <= lease_ends + lease_grace:
            return "its last attempt is not certain to be over; its processes are being stopped"
    if job.not_before is not None and job.not_before > now:
        return f"backs off after a failure, for another {(job.not_before - now).total_seconds():.0f} s"
    return None


def _space_reason(job: Queued, space: Space | None) -> str | None:
    if job.former_reason is not FailureReason.STORAGE_FULL or space is None or space.free_bytes >= space.needed_bytes:
        return None
    return (
        f"found the disk full; {space.free_bytes >> 20} MiB are free there and {space.needed_bytes >> 20} MiB have to be. "
        "Ask the operator to free space"
    )


def waits_for_plan(job: Queued, pool: PoolState | None) -> bool:
    """Return True for a job that is planned before it is placed, and has no plan yet."""
    return pool is not None and pool.needs_plans and not job.is_planned


def _plan_reason(job: Queued, pool: PoolState | None) -> str | None:
    return WAITS_FOR_PLAN if waits_for_plan(job, pool) else None


def _pool_reason(job: Queued, pool: PoolState | None, free: int, blocker: Queued | None) -> str | None:
    if pool is None:
        return f"pool {job.pool!r} is not configured any more; ask the operator"
    if pool.slots_present is None:
        return f"the cluster has not yet said what pool {pool.name!r} has"
    if blocker is not None:
        return f"{blocker.id} is ahead in pool {pool.name!r} and needs {blocker.worker_counts[-1]} slots; {free} are free"
    if most_of(job.worker_counts, free) is None:
        there = min(pool.slots, pool.slots_present)
        missing = "" if there == pool.slots else f" ({pool.slots - there} of {pool.slots} are away)"
        fewest = job.worker_counts[-1]
        return f"needs {fewest} slots of pool {pool.name!r}; {free} of {there} are free{missing}"
    return None
