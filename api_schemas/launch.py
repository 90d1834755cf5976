"""What the dispatcher hands to a launcher and what that answers: the seam between control plane and cluster."""

from enum import StrEnum

from pydantic import Field

from api_schemas.base import Contract, JsonScalar, Timestamp
from api_schemas.job import JobSpec
from api_schemas.resources import PoolConfig
from api_schemas.states import FailureReason


class CheckpointRef(Contract):
    """A checkpoint that an attempt may resume from, if its files still have these hashes."""

    step: int
    name: str
    sha256: str


class LaunchOrder(Contract):
    """All that an attempt needs to run. The token is the attempt's alone and is never stored in clear."""

    attempt_id: str = Field(pattern=r"^att_[0-9a-z]{26}$")
    job_id: str = Field(pattern=r"^job_[0-9a-z]{26}$")
    epoch: int = Field(ge=1)
    token: str = Field(repr=False)
    spec: JobSpec
    pool: PoolConfig
    report_url: str = Field(description="base URL of the control plane, as the workers reach it")
    job_dir: str = Field(description="the job's own folder, shared by its workers: checkpoints and spools")
    checkpoints: tuple[CheckpointRef, ...] = Field(description="newest first; the first that passes its check is used")
    lease_s: float
    heartbeat_s: float


class ProbeState(StrEnum):
    """What the cluster knows of an attempt. Never taken as liveness: that is the lease."""

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
    """The answer to "what became of this attempt". `reason` and `message` are set once it has exited with an error."""

    state: ProbeState
    placed_at: Timestamp | None = None
    reason: FailureReason | None = None
    message: str | None = None
    data: dict[str, JsonScalar] = Field(default_factory=dict)


class PoolCapacity(Contract):
    """Slots that a cluster has now for a pool: nodes may be away."""

    pool: str
    slots_present: int
