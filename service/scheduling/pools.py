"""Reads the state of the pools for a decision: slots, what tenants and loans take of them, and what comes back."""

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping

from octet.api_schemas import FailureReason, PoolConfig
from octet.service import store
from octet.service.db.bulk import Transaction
from octet.service.scheduling.decide import PoolState, Space
from octet.service.settings import Settings
from octet.service.store.queue import QueuedJob


def read_pools(
    transaction: Transaction, pools: Iterable[PoolConfig], present: Mapping[str, int] | None = None
) -> list[PoolState]:
    """Describe the configured pools as they are now. present: slots that the cluster has, by pool; by default those stored."""
    if present is None:
        present = store.queue.slots_present(transaction)
    used, leaving = store.queue.use_by_tenant(transaction), store.queue.slots_leaving(transaction)
    lent: Counter[str] = Counter()
    for loan in store.queue.loans(transaction):
        lent[loan.pool] += loan.workers
    return [
        PoolState(
            pool.name,
            pool.slots,
            present.get(pool.name),
            used.get(pool.name, {}),
            pool.tenants,
            needs_plans=pool.plans_jobs,
            backfills=pool.backfill,
            lent=lent[pool.name],
            leaving=leaving.get(pool.name, 0),
        )
        for pool in pools
    ]


def space_for(queue: Iterable[QueuedJob], settings: Settings) -> Space | None:
    """Measure the file system of the data folder. None if no job waits for space, or if this process has no such folder."""
    if all(job.former_reason is not FailureReason.STORAGE_FULL for job in queue):
        return None
    try:
        return Space(shutil.disk_usage(settings.data_dir).free, settings.free_space_bytes)
    except OSError:
        return None
