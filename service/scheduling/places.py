"""Finds where queued jobs stand and what they wait for, by the decision that the dispatcher takes.

Far back in the queue only the number counts. What was found is kept until the queue, a slot or a pool changes, which the
version of the tallies tells, so that many readers of a long queue read it once.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from octet.api_schemas import FailureReason, JobState, QueuePlace
from octet.service import store
from octet.service.db.bulk import Transaction
from octet.service.db.engine import Database
from octet.service.scheduling.decide import Decision, PoolState, decide, waits_for_plan
from octet.service.scheduling.estimate import starts_at
from octet.service.scheduling.pools import has_quotas, read_pools, space_for
from octet.service.settings import Settings
from octet.service.store.queue import Place, QueuedJob
from octet.service.store.tallies import Tallies

STARTS_SOON = "it fits and starts with the next pass of the dispatcher"
_MOST_POSITIONS = 10_000
QUOTAS_KNOWN_S = 1.0
"""The time for which the use of tenants' quotas is kept: it grows with time and with each checkpoint."""


@dataclass
class _Known:
    """The known part of one version of the queue. `places` are by pool and job, for pools whose decision holds at any time."""

    version: int
    num_queued: dict[str, int]
    since_s: float = field(default_factory=time.monotonic)
    positions: dict[str, int] = field(default_factory=dict)
    num_tenants: dict[str, int] = field(default_factory=dict)
    heads: dict[str, list[QueuedJob]] = field(default_factory=dict)
    states: list[PoolState] | None = None
    places: dict[str, dict[str, Decision]] = field(default_factory=dict)

    @classmethod
    def of(cls, tallies: Tallies) -> "_Known":
        queued = {pool: count for (pool, state), count in tallies.jobs.items() if state is JobState.QUEUED}
        return cls(tallies.version, queued)


class QueuePlaces:
    """The places of queued jobs, as one process shows them."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._known = _Known(-1, {})

    def read(self, transaction: Transaction, jobs: Sequence[Place]) -> dict[str, QueuePlace]:
        """Find the places of queued jobs, by id, in a transaction that only reads."""
        if not jobs:
            return {}
        tallies, known = store.tallies.read(transaction), self._known
        if known.version != tallies.version or len(known.positions) > _MOST_POSITIONS or self._is_old(known):
            known = self._known = _Known.of(tallies)
        return self._places(transaction, jobs, known)

    def _is_old(self, known: _Known) -> bool:
        """Return True if use of quotas may have changed since, which the tallies do not tell."""
        return has_quotas(self._settings) and time.monotonic() - known.since_s >= QUOTAS_KNOWN_S

    def read_while_writing(self, transaction: Transaction, jobs: Sequence[Place]) -> dict[str, QueuePlace]:
        """Find the places in a transaction that writes. Nobody else may see them, because it may come to nothing."""
        return self._places(transaction, jobs, _Known.of(store.tallies.read(transaction))) if jobs else {}

    def _places(self, transaction: Transaction, jobs: Sequence[Place], known: _Known) -> dict[str, QueuePlace]:
        unknown = [job for job in jobs if job.id not in known.positions]
        known.positions |= store.queue.positions(transaction, unknown, known.num_queued)
        decided: dict[str, Decision] = {}
        for pool in {job.pool for job in jobs if self._may_be_ahead(transaction, job, known)}:
            decided |= known.places.get(pool) or self._decide(transaction, pool, known)
        return self._estimated(transaction, jobs, decided, known)

    def _estimated(
        self, transaction: Transaction, jobs: Sequence[Place], decided: Mapping[str, Decision], known: _Known
    ) -> dict[str, QueuePlace]:
        """Say where jobs stand, with the start as it is estimated by the progress that running jobs report."""
        pools = {job.pool for job in jobs if job.id in decided and decided[job.id].missing}
        now = self._database.now(transaction)
        releases = store.queue.releases(transaction, pools, now) if pools else {}
        places: dict[str, QueuePlace] = {}
        for job in jobs:
            decision = decided.get(job.id)
            missing = None if decision is None else decision.missing
            at = None if missing is None else starts_at(missing, releases.get(job.pool, ()), now)
            places[job.id] = place_of(job, decision, known.positions[job.id], at)
        return places

    def _may_be_ahead(self, transaction: Transaction, job: Place, known: _Known) -> bool:
        """Return False for a job far back, which is not decided about. Of several tenants each has a head of its own."""
        if known.positions[job.id] <= store.queue.HEAD_OF_QUEUE:
            return True
        if job.pool not in known.num_tenants:
            known.num_tenants[job.pool] = len(store.queue.tenants_waiting(transaction, job.pool))
        return known.num_tenants[job.pool] > 1

    def _decide(self, transaction: Transaction, pool: str, known: _Known) -> dict[str, Decision]:
        """Decide about the head of a pool's queue. It is kept unless it changes with time or with space on the disk."""
        if pool not in known.heads:
            known.heads[pool] = store.queue.head_of_queue(transaction, pool)
        head = known.heads[pool]
        places = {each.job_id: each for each in self._decided(transaction, head, known)}
        states = {state.name: state for state in known.states or ()}
        if not any(_changes_by_itself(job) or waits_for_plan(job, states.get(job.pool)) for job in head):
            known.places[pool] = places
        return places

    def _decided(self, transaction: Transaction, queue: Sequence[QueuedJob], known: _Known) -> list[Decision]:
        now, space = self._database.now(transaction), space_for(queue, self._settings)
        if known.states is None:
            known.states = read_pools(transaction, self._settings, now)
        return decide(queue, known.states, now, self._settings.lease_grace_s, space)


def _changes_by_itself(job: QueuedJob) -> bool:
    waits_for_space = job.former_reason is FailureReason.STORAGE_FULL
    return job.not_before is not None or job.former_attempt_at_large or waits_for_space


def place_of(job: Place, decision: Decision | None, position: int, starts_at: datetime | None = None) -> QueuePlace:
    """Say where a job stands. Jobs far back are not decided about: their position is by priority and age alone."""
    if decision is None:
        return QueuePlace(position=position, why=f"{position - 1} jobs are ahead in pool {job.pool!r}")
    return QueuePlace(
        position=decision.position, why=decision.why or STARTS_SOON, missing_slots=decision.missing, starts_at=starts_at
    )
