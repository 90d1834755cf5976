"""Finds the places of jobs that are being submitted, mostly without a statement.

Nearly always nothing has happened to the queue since this process added the jobs before them. Then their number and the first
few jobs of the queue say all: how many are ahead, and which job holds back the others.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from api_schemas import JobState, QueuePlace
from service import store
from service.db.bulk import Transaction
from service.scheduling.decide import Decision, PoolState, decide, pool_states
from service.scheduling.places import QueuePlaces, place_of
from service.scheduling.space import space_for
from service.settings import Settings
from service.store.jobs import NewJob
from service.store.queue import QueuedJob
from service.store.tallies import Before

_FIRST = 8
"""Jobs of the queue among which the one that holds back all others nearly always is."""


@dataclass
class _Queue:
    """What is known of the queue that some jobs were added to. It has changed since if its version or last job is another.

    num_behind: jobs behind those of a pool and priority. first: the first few jobs of a pool.
    """

    version: int = -1
    last_job_id: str | None = None
    num_behind: dict[tuple[str, int], int] = field(default_factory=dict)
    first: dict[str, list[QueuedJob]] = field(default_factory=dict)
    states: list[PoolState] | None = None

    def add(self, jobs: Sequence[QueuedJob]) -> None:
        """Add jobs to what is known. They are younger than all others."""
        num_added = Counter((job.pool, job.priority) for job in jobs)
        for pool, priority in self.num_behind:
            lower = (num for (other, below), num in num_added.items() if other == pool and below < priority)
            self.num_behind[pool, priority] += sum(lower)
        for pool, first in self.first.items():
            both = [*first, *(job for job in jobs if job.pool == pool)]
            self.first[pool] = sorted(both, key=lambda job: (-job.priority, job.id))[:_FIRST]


class Arrivals:
    """The places of jobs as one process submits them. One thread uses it."""

    def __init__(self, settings: Settings, places: QueuePlaces) -> None:
        """places: finds the places of those that need more of the queue."""
        self._settings = settings
        self._of_others = places
        self._queue = _Queue()

    def places(self, transaction: Transaction, new: Sequence[NewJob], before: Before) -> dict[str, QueuePlace]:
        """Find the places, by id, of the jobs that this transaction has added. before: what it found.

        What is known afterwards is true only if the transaction is committed. If it is not, its last job is never found.
        """
        if not new:
            return {}
        added, tallies = store.queue.as_queued(transaction, new), before.tallies
        queue = self._queue
        if (queue.version, queue.last_job_id) == (tallies.version, before.last_job_id):
            queue.add(added)
        else:
            queue = self._queue = _Queue()
        queue.version, queue.last_job_id = tallies.version + len(new), max(job.id for job in new)
        positions = _positions(transaction, added, before, queue)
        decided: dict[str, Decision] = {}
        for pool in {job.pool for job in new}:
            near = [job for job in added if job.pool == pool and positions[job.id] <= store.queue.HEAD_OF_QUEUE]
            found = self._decide(transaction, pool, near, new[0], queue) if near else {}
            if found is None:
                return self._of_others.read_while_writing(transaction, new)
            decided |= found
        return {job.id: place_of(job, decided.get(job.id), positions[job.id]) for job in new}

    def _decide(
        self, transaction: Transaction, pool: str, near: Sequence[QueuedJob], one: NewJob, queue: _Queue
    ) -> dict[str, Decision] | None:
        """Decide about new jobs from the first few of the queue. Returns None unless one of those holds back the others.

        one: any of the new jobs; it says what time it is.
        """
        if pool not in queue.first:
            queue.first[pool] = store.queue.head_of_queue(transaction, pool, _FIRST)
        if queue.states is None:
            present, used = store.queue.slots_present(transaction), store.queue.slots_used(transaction)
            queue.states = pool_states(self._settings.pools, present, used)
        first = queue.first[pool]
        ids = {job.id for job in first}
        known = [*first, *(job for job in near if job.id not in ids)]
        space = space_for(known, self._settings)
        decisions = decide(known, queue.states, one.created_at, self._settings.lease_grace_s, space)
        if len(first) < _FIRST or any(each.holds_back and each.job_id in ids for each in decisions):
            return {each.job_id: each for each in decisions}
        return None


def _positions(transaction: Transaction, added: Sequence[QueuedJob], before: Before, queue: _Queue) -> dict[str, int]:
    """Number the added jobs within the queues of their pools, from 1: all but those behind each."""
    found: dict[str, int] = {}
    for pool, priority in sorted({(job.pool, job.priority) for job in added}):
        num_queued = before.tallies.jobs.get((pool, JobState.QUEUED), 0) + sum(job.pool == pool for job in added)
        ids = sorted(job.id for job in added if (job.pool, job.priority) == (pool, priority))
        if (pool, priority) not in queue.num_behind:
            queue.num_behind[pool, priority] = store.queue.num_behind(transaction, pool, priority, num_queued)
        last = num_queued - queue.num_behind[pool, priority]
        found |= {id_: last - num_after for num_after, id_ in enumerate(reversed(ids))}
    return found
