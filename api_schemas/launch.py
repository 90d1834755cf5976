"""Orders to a launcher and its answers: the seam between control plane and cluster."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from pydantic import Field

from octet.api_schemas.base import Contract, JsonScalar, Timestamp
from octet.api_schemas.data.files import ANY_FILE, Files
from octet.api_schemas.data.stores import StoreAccess
from octet.api_schemas.job import JobSpec
from octet.api_schemas.resources import PoolConfig, RankUser
from octet.api_schemas.states import FailureReason
from octet.api_schemas.tracking import TrackersSpec


class CheckpointRef(Contract):
    """A checkpoint that an attempt may resume from, if its files still have these hashes."""

    step: int
    name: str
    sha256: str


class LaunchOrder(Contract):
    """Everything that an attempt needs to run. Each attempt has its own token, which is never stored in clear text."""

    attempt_id: str = Field(pattern=r"^att_[0-9a-z]{26}$")
    job_id: str = Field(pattern=r"^job_[0-9a-z]{26}$")
    epoch: int = Field(ge=1)
    token: str = Field(repr=False)
    spec: JobSpec
    pool: PoolConfig
    report_url: str = Field(description="base URL of the control plane, as the workers reach it")
    report_ca: str | None = Field(
        default=None, description="PEM: the certificates that are trusted in that URL; null for those of the node's system"
    )
    report_name: str | None = Field(
        default=None, description="the name that its certificate is checked for; null for the URL's host"
    )
    data_roots: tuple[str, ...] | None = Field(
        default=None, description="folders that the ranks may read data from; null for no restriction"
    )
    stores: StoreAccess = Field(default=StoreAccess(), description="the object stores that the ranks may use")
    user: RankUser | None = Field(default=None, description="the ranks run as this user; null: as the process that starts them")
    job_dir: str = Field(description="the job's folder for checkpoints and spools, shared by its workers")
    checkpoints: tuple[CheckpointRef, ...] = Field(description="newest first; the first that passes its check is used")
    trackers: TrackersSpec = Field(default=TrackersSpec(), description="the job's and the operator's")
    traceparent: str | None = Field(
        default=None, description="the span of the request that submitted the job; the ranks' TRACEPARENT"
    )
    lease_s: float
    heartbeat_s: float

    @property
    def files(self) -> Files:
        """The files and object stores that the ranks may read data from."""
        if self.data_roots is None:
            return replace(ANY_FILE, stores=self.stores)
        return Files.below(tuple(map(Path, self.data_roots)), self.stores)


class ProbeState(StrEnum):
    """The state of an attempt as the cluster knows it. It never proves liveness; the lease does."""

    ABSENT = "absent"
    PLACING = "placing"
    RUNNING = "running"
    EXITED = "exited"
    UNREACHABLE = "unreachable"


class AttemptRef(Contract):
    """Names an attempt to a launcher."""

    attempt_id: str
    epoch: int


class Probe(Contract):
    """The cluster's answer about one attempt. `reason` and `message` are set if it exited with an error."""

    state: ProbeState
    placed_at: Timestamp | None = None
    reason: FailureReason | None = None
    message: str | None = None
    data: dict[str, JsonScalar] = Field(default_factory=dict)


class PoolCapacity(Contract):
    """The slots that a cluster has now for a pool. There may be fewer than configured while nodes are away.

    nodes: the addresses of all nodes of the cluster, sorted. slots_without_device: further slots that nodes offer without the
    device that each of the pool's ranks takes.
    """

    pool: str
    slots_present: int
    nodes: tuple[str, ...]
    slots_without_device: int = 0
