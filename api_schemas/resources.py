"""Pools of similar nodes, and the share of a pool that a job asks for."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from octet.api_schemas.base import Contract, refusal
from octet.api_schemas.devices import DEVICES
from octet.api_schemas.keys import TENANT

PoolName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
TenantName = Annotated[str, Field(pattern=f"^{TENANT}$")]
LabelValue = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
Limit = Annotated[float | None, Field(gt=0, le=1e9)]
"""The most of something that a job may take; None: no limit."""
LabelKey = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9./-]{0,61}[a-z0-9])?$")]


class ResourceSpec(Contract):
    """`workers` ranks in one pool. They start together or not at all, and each takes one slot.

    An elastic job writes `workers: {min: 2, max: 8}`, which is stored as workers 8 and min_workers 2.
    """

    pool: PoolName = "cpu"
    workers: int = Field(default=1, ge=1, le=65_536, description="the most, where min_workers is set")
    min_workers: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description="go on with as few ranks while slots are away, at the same global batch, and grow again at a checkpoint; "
        "null: always as many as workers",
    )

    max_slot_hours: Limit = Field(
        default=None,
        description="hours of slots that all its attempts may take together; then it saves a checkpoint and is cancelled",
    )
    max_hours: Limit = Field(
        default=None, description="the same for the hours that its attempts run, whatever their slots; waiting does not count"
    )
    max_cost: Limit = Field(
        default=None, description="the same for slot hours at the price of the pool (slot_hour_price), which has to have one"
    )

    force: bool = Field(default=False, description="start the job even if its plan says that it cannot fit the pool's devices")

    @model_validator(mode="before")
    @classmethod
    def _read_range(cls, given: Any) -> Any:
        """Accept `workers: {min, max}`."""
        if not isinstance(given, Mapping) or not isinstance(given.get("workers"), Mapping):
            return given
        if set(given["workers"]) != {"min", "max"} or "min_workers" in given:
            got = {name: value for name, value in given.items() if name != "pool"}
            raise refusal("workers", got=got, allowed="a number, or {min, max}", change="Give both min and max, and no others.")
        return {**given, "workers": given["workers"]["max"], "min_workers": given["workers"]["min"]}


class RankUser(Contract):
    """The user and the group, as numbers, that ranks run as. Neither may be root's."""

    uid: int = Field(ge=1, le=0xFFFF_FFFE)
    gid: int = Field(ge=1, le=0xFFFF_FFFE)


class TenantConfig(Contract):
    """The part of a pool that a tenant has. Slots that nobody else wants are free to all, up to each tenant's limits."""

    share: float = Field(
        default=1,
        gt=0,
        le=1000,
        description="of slots, in relation to other tenants' that have jobs of the same priority waiting",
    )
    slots: int | None = Field(
        default=None, ge=1, le=1_000_000, description="most slots that its jobs take at once; null: no limit"
    )
    jobs: int | None = Field(default=None, ge=1, le=1_000_000, description="most of its jobs that run at once; null: no limit")
    slot_hours_per_month: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        description="most hours of slots that its attempts take together in a month (UTC); then its jobs save a checkpoint and "
        "wait for the next month. null: no limit",
    )
    user: RankUser | None = Field(
        default=None, description="its ranks run as this user, which owns their folders; null: as Ray's; nodes run Ray as root"
    )


class PoolConfig(Contract):
    """A pool as the operator configures it. One slot is one rank; on a GPU pool, one device."""

    name: PoolName
    node_label: tuple[LabelKey, LabelValue] = Field(
        description="key and value of the Ray node label that marks the pool's nodes"
    )
    slots: int = Field(ge=1, le=1_000_000, description="ranks that the whole pool can ever run at once")
    accelerator: Literal["cpu", "cuda"] = "cpu"
    min_compute_capability: tuple[int, int] | None = Field(
        default=None,
        description="a cuda worker on an older device refuses to start; (8, 9) is the first generation with FP8 matrix units",
    )
    memory_per_device_bytes: int | None = Field(default=None, ge=1)
    device: str | None = Field(
        default=None, description=f"the model of its GPUs, for the least time of a step in plans; one of {', '.join(DEVICES)}"
    )
    slot_hour_price: float | None = Field(
        default=None, ge=0, description="in the operator's currency, for the least price of a job in plans"
    )
    threads_per_worker: int = Field(default=1, ge=1, le=1024)
    allows_entrypoints: bool = Field(
        default=False,
        description="run models of family python and tasks of `evaluation`: any code that the workers' Python can import",
    )
    backfill: bool = Field(
        default=True, description="lend slots that a waiting job cannot use yet to jobs behind it, which make way when it fits"
    )
    preempts: bool = Field(
        default=False, description="have jobs of lower priorities make way, after a checkpoint, for one that fits then"
    )
    tenants: dict[TenantName, TenantConfig] = Field(
        default_factory=dict, description="shares and limits by tenant; others have a share of 1 and no limit"
    )

    @model_validator(mode="after")
    def _knows_device(self) -> Self:
        if self.device is not None and (self.device not in DEVICES or self.accelerator != "cuda"):
            allowed = f"with accelerator cuda, one of {', '.join(DEVICES)}"
            change = "Correct it, or leave it out: plans then say nothing about time."
            raise refusal("device", got=self.device, allowed=allowed, change=change)
        return self

    def of_tenant(self, tenant: str) -> TenantConfig:
        """Return the share and the limits of a tenant."""
        return self.tenants.get(tenant, _UNLIMITED)

    @property
    def has_users(self) -> bool:
        """True if ranks of some tenants run as users of their own."""
        return any(tenant.user is not None for tenant in self.tenants.values())

    @property
    def plans_jobs(self) -> bool:
        """True if jobs of the pool are planned before they are placed: it says what its devices hold."""
        return self.memory_per_device_bytes is not None

    @property
    def slot_resource(self) -> str:
        """The countable Ray resource of the pool. A node offers one unit for each rank that it can run."""
        return f"octet_slot_{self.name}"


_UNLIMITED = TenantConfig()


class Pool(Contract):
    """A pool as the API shows it."""

    object: Literal["pool"] = "pool"
    name: str
    accelerator: str
    slots: int = Field(description="what the operator has configured")
    slots_present: int | None = Field(description="what nodes offer; null until the cluster has been seen")
    slots_used: int
    jobs_queued: int
    jobs_live: int
    memory_per_device_bytes: int | None
    threads_per_worker: int
    measured_to_planned: float | None = Field(
        default=None,
        description="median of measured over planned bytes of the pool's last jobs; null before ten of them have succeeded",
    )
    step_time_to_planned: float | None = Field(
        default=None,
        description="median of these jobs' measured steps over the middle of predicted ranges; null before ten have both",
    )


class Loop(Contract):
    """A loop of the dispatcher that leads, as the API shows it."""

    object: Literal["loop"] = "loop"
    name: str
    is_stalled: bool = Field(description="true if it has made no progress for too long")
