"""Decides what tenants' quotas mean: which jobs wait, what is deleted, and when a job has reached a limit of its own. Pure."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from octet.api_schemas.quotas import TenantQuota
from octet.service.store.use import Kept, month_of


class Storage(NamedTuple):
    """The bytes of a tenant's checkpoints and exports, and those with which its jobs wait."""

    num_bytes: int
    most_bytes: int


def hours_reason(tenant: str, pool: str, hours: float, most: float | None, now: datetime) -> str | None:
    """Say why a tenant's jobs wait that have taken all slot hours of the month. None if there are some left."""
    if most is None or hours < most:
        return None
    return (
        f"tenant {tenant!r} has taken {hours:.4g} of the {most:.4g} slot hours that it may take in pool {pool!r} this month; "
        f"the next month begins on {month_of(now)[1]:%Y-%m-%d} (UTC)"
    )


def storage_reason(tenant: str, storage: Storage | None) -> str | None:
    """Say why a tenant's jobs wait whose checkpoints and exports take all the storage that they may."""
    if storage is None or storage.num_bytes < storage.most_bytes:
        return None
    taken = f"{_size(storage.num_bytes)} of {_size(storage.most_bytes)}"
    return f"checkpoints and exports of tenant {tenant!r} take {taken}, all that they may; delete some, or jobs that are over"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} PB"


def to_collect(kept: Sequence[Kept], num_bytes: int, quota: TenantQuota) -> list[Kept]:
    """Choose what is deleted so that a tenant's jobs need not wait: the first of what may go, and no more than is needed.

    kept: what may be deleted, in the order in which it goes. num_bytes: what all checkpoints and exports take.
    """
    chosen: list[Kept] = []
    for each in kept:
        if num_bytes < quota.storage_bytes:
            break
        chosen.append(each)
        num_bytes -= each.num_bytes
    return chosen
