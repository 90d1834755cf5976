"""The records of a running job: attempts, events, log lines, metrics, checkpoints."""

from typing import Literal

from pydantic import Field

from octet.api_schemas.base import Contract, JsonScalar, Timestamp
from octet.api_schemas.states import AttemptState, FailureReason


class Attempt(Contract):
    """One placement of a job on the cluster. Each attempt raises `epoch` by one; writes with an older epoch are refused."""

    object: Literal["attempt"] = "attempt"
    id: str
    job_id: str
    epoch: int
    state: AttemptState
    pool: str
    workers: int
    node: str | None
    device: str | None
    created_at: Timestamp
    placed_at: Timestamp | None
    process_up_at: Timestamp | None
    torch_imported_at: Timestamp | None
    model_built_at: Timestamp | None
    first_step_at: Timestamp | None
    warmed_up_at: Timestamp | None = Field(default=None, description="null where nothing is compiled")
    finished_at: Timestamp | None
    last_report_at: Timestamp | None
    lease_expires_at: Timestamp | None
    resumed_from_step: int | None
    last_step: int | None
    reason: FailureReason | None
    message: str | None


class Event(Contract):
    """One thing that happened to a job. `seq` counts from 1 without gaps within a job."""

    object: Literal["event"] = "event"
    id: str
    job_id: str
    seq: int = Field(ge=1)
    at: Timestamp
    type: str
    attempt_id: str | None
    message: str
    data: dict[str, JsonScalar]
    actor: str | None = Field(
        default=None,
        description="who caused it: a caller by the name and id of its key, `rank N` for what a rank says, `octet` for the "
        "service itself; null in an event of an older version",
    )


class LogLine(Contract):
    """One line of a rank's log. `seq` counts from 1 without gaps within a job, over its ranks and attempts."""

    object: Literal["log_line"] = "log_line"
    seq: int = Field(ge=1)
    at: Timestamp
    attempt_id: str
    rank: int
    level: str
    message: str


class MetricPoint(Contract):
    """One optimizer step of the job's curve. The curve has each step once, from the attempt that counts."""

    object: Literal["metric_point"] = "metric_point"
    step: int = Field(ge=1)
    at: Timestamp
    attempt_id: str
    loss: float | None = Field(description="mean over the global batch, nats per token; null if not finite")
    gradient_norm: float | None = Field(description="global L2 norm before clipping; null if not finite")
    learning_rate: float
    tokens: int = Field(description="tokens trained on in this step, over all ranks")
    step_time_s: float
    data_wait_s: float
    tokens_per_s: float
    evaluation_loss: float | None = None
    evaluation_perplexity: float | None = None
    evaluation_metrics: dict[str, float | None] = Field(
        default_factory=dict, description="other values that the model's family measures, by name; empty without an evaluation"
    )


class Checkpoint(Contract):
    """A complete checkpoint. Its manifest lists each file's size and SHA-256; `sha256` is the hash of the manifest."""

    object: Literal["checkpoint"] = "checkpoint"
    id: str
    job_id: str
    attempt_id: str
    step: int
    created_at: Timestamp
    num_bytes: int
    sha256: str
    loss: float | None


class CheckpointFile(Contract):
    """A file of a checkpoint. `path` is relative to the checkpoint's folder."""

    object: Literal["checkpoint_file"] = "checkpoint_file"
    path: str
    num_bytes: int
    sha256: str
