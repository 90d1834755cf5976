"""Reads the state of the pools for a decision: slots, what tenants and loans take of them, and what comes back."""

import shutil
from collections.abc import Iterable, Sequence
from datetime import datetime

from octet.api_schemas import FailureReason, PoolCapacity, PoolConfig
from octet.api_schemas.quotas import PoolUse, TenantUse
from octet.service import store
from octet.service.db.bulk import Transaction
from octet.service.scheduling.decide import PoolState, Space
from octet.service.scheduling.quotas import Storage
from octet.service.settings import Settings
from octet.service.store.queue import QueuedJob, Use


def read_pools(
    transaction: Transaction, settings: Settings, now: datetime, capacities: Sequence[PoolCapacity] | None = None
) -> list[PoolState]:
    """Describe the configured pools as they are now. capacities: what the cluster has; by default what is stored of it."""
    if capacities is None:
        capacities = store.queue.capacities(transaction)
    capacity = {each.pool: each for each in capacities}
    used, leaving = _used(transaction, settings.pools, now), store.queue.slots_leaving(transaction)
    quotas = settings.quotas.tenants
    stored = store.use.storage_of(transaction, quotas)
    storage = {tenant: Storage(num_bytes, quotas[tenant].storage_bytes) for tenant, num_bytes in stored.items()}
    loans = store.queue.loans(transaction, [pool.name for pool in settings.pools if pool.preempts])
    return [
        PoolState(
            pool.name,
            pool.slots,
            capacity[pool.name].slots_present if pool.name in capacity else None,
            used.get(pool.name, {}),
            pool.tenants,
            needs_plans=pool.plans_jobs,
            backfills=pool.backfill,
            loans=tuple(loan for loan in loans if loan.pool == pool.name),
            leaving=leaving.get(pool.name, 0),
            storage=storage,
            without_device=capacity[pool.name].slots_without_device if pool.name in capacity else 0,
        )
        for pool in settings.pools
    ]


def has_quotas(settings: Settings) -> bool:
    """Return True if there are quotas whose use changes with time and with what is saved."""
    return bool(settings.quotas.tenants) or bool(pools_with_hours(settings.pools))


def pools_with_hours(pools: Iterable[PoolConfig]) -> list[str]:
    """Name the pools that limit the slot hours of tenants in a month."""
    return [pool.name for pool in pools if any(each.slot_hours_per_month is not None for each in pool.tenants.values())]


def use_of(transaction: Transaction, settings: Settings, tenants: Iterable[str], now: datetime) -> list[TenantUse]:
    """Say what tenants use, beside what they may."""
    used = store.queue.use_by_tenant(transaction)
    hours = store.use.hours_of_month(transaction, [pool.name for pool in settings.pools], now)
    stored, quotas = store.use.storage_of(transaction, tenants), settings.quotas.tenants

    def of_pool(pool: PoolConfig, tenant: str) -> PoolUse:
        use, most = used.get(pool.name, {}).get(tenant, Use()), pool.of_tenant(tenant)
        return PoolUse(
            pool=pool.name,
            slots=use.slots,
            most_slots=most.slots,
            jobs=use.jobs,
            most_jobs=most.jobs,
            slot_hours=hours.get(pool.name, {}).get(tenant, 0.0),
            most_slot_hours=most.slot_hours_per_month,
        )

    return [
        TenantUse(
            tenant=tenant,
            month_ends_at=store.use.month_of(now)[1],
            storage_bytes=num_bytes,
            most_storage_bytes=quotas[tenant].storage_bytes if tenant in quotas else None,
            pools=tuple(of_pool(pool, tenant) for pool in settings.pools),
        )
        for tenant, num_bytes in sorted(stored.items())
    ]


def _used(transaction: Transaction, pools: Iterable[PoolConfig], now: datetime) -> dict[str, dict[str, Use]]:
    used = store.queue.use_by_tenant(transaction)
    limiting = pools_with_hours(pools)
    for pool, by_tenant in store.use.hours_of_month(transaction, limiting, now).items() if limiting else ():
        of_pool = used.setdefault(pool, {})
        for tenant, hours in by_tenant.items():
            of_pool[tenant] = of_pool.get(tenant, Use())._replace(hours=hours)
    return used


def space_for(queue: Iterable[QueuedJob], settings: Settings) -> Space | None:
    """Measure the file system of the data folder. None if no job waits for space, or if this process has no such folder."""
    if all(job.former_reason is not FailureReason.STORAGE_FULL for job in queue):
        return None
    try:
        return Space(shutil.disk_usage(settings.data_dir).free, settings.free_space_bytes)
    except OSError:
        return None
