"""Reports of a rank to the control plane and the reply: `POST /internal/v1/attempts/{id}/reports`.

A rank's reports are one ordered stream. Each has a sequence number that rises by one; the control plane applies a batch
in one transaction and skips what it has already applied, so a rank may send again everything that was not acknowledged.
An empty batch is a heartbeat. Every reply renews the lease and carries the desired state.
"""

from typing import Annotated, Literal

from pydantic import Field

from octet.api_schemas.base import Contract, Timestamp
from octet.api_schemas.export import EXPORT_NAME, Activations, ExportLayout, Format, MismatchCard
from octet.api_schemas.job import JobSummary
from octet.api_schemas.measured import MAX_LAYERS, LayerHealth, MemoryBytes
from octet.api_schemas.states import DesiredState, FailureReason

StartPhase = Literal["placed", "process_up", "torch_imported", "model_built", "first_step", "warmed_up"]
MAX_REPORTS_PER_BATCH = 1000
MAX_EVENT_VALUES = 16

Step = Annotated[int, Field(ge=1, le=2**53)]
Count = Annotated[int, Field(ge=0, le=2**53)]
EventKey = Annotated[str, Field(max_length=64)]
EventValue = Annotated[str, Field(max_length=1024)] | int | float | bool | None


class PhaseReport(Contract):
    """The start has reached a phase. `warmed_up`: the steps are over in which torch compiles; only where it compiles."""

    kind: Literal["phase"] = "phase"
    phase: StartPhase


class StartedReport(Contract):
    """Training begins after `resumed_from_step`; 0 means from the beginning. Later steps are dropped from the job's curve."""

    kind: Literal["started"] = "started"
    resumed_from_step: Count
    steps: Step | None = Field(default=None, description="the job's last step, counted from its epochs if it has any")
    node: str
    device: str
    world_size: Count
    num_parameters: Count
    num_layers_converted: Count
    num_layers_filtered: Count = Field(default=0, description="converted layers in bf16 because FP8 gains nothing there")
    num_layers_skipped: Count


class StepReport(Contract):
    """One optimizer step, over all ranks. A loss or norm is null if it is not finite."""

    kind: Literal["step"] = "step"
    step: Step
    loss: float | None
    gradient_norm: float | None
    learning_rate: float
    tokens: Count
    step_time_s: float
    data_wait_s: float


class EvaluationReport(Contract):
    """The mean loss over the evaluation batches after `step`, in nats per target: a token or an image."""

    kind: Literal["evaluation"] = "evaluation"
    step: Step
    loss: float | None
    tokens: Count
    metrics: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")], float | None] = Field(
        default_factory=dict,
        max_length=128,
        description="other values that the model's family measures, and scores of the job's `evaluation`, by name",
    )


class CheckpointReport(Contract):
    """A complete checkpoint on disk, in the folder `name` inside the job's own folder."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: Step
    name: str = Field(pattern=r"^step_[0-9]{10}$")
    num_bytes: Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    loss: float | None


class ExportReport(Contract):
    """A complete export on disk, in the folder `name` below the job's exports. A retried attempt may send it again."""

    kind: Literal["export"] = "export"
    step: Step
    name: str = Field(pattern=rf"^{EXPORT_NAME}$")
    format: Format
    layout: ExportLayout
    activations: Activations
    num_bytes: Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    mismatch: MismatchCard | None = None
    address: str | None = Field(default=None, max_length=2048, description="the URL of its copy in an object store")


class MeasuredReport(Contract):
    """Measurements of this rank, after so many steps. What is null keeps the values of the report before."""

    kind: Literal["measured"] = "measured"
    step: Count
    memory: MemoryBytes | None = None
    layers: tuple[LayerHealth, ...] | None = Field(default=None, max_length=MAX_LAYERS)


class ExporterReport(Contract):
    """The address of this rank's Prometheus metrics. Every rank sends it before any other report."""

    kind: Literal["exporter"] = "exporter"
    address: str = Field(pattern=r"^(\[[0-9a-f:.]+\]|[0-9a-z.-]{1,253}):[0-9]{1,5}$", max_length=262, description="host:port")


class LogReport(Contract):
    """One line of this rank's log."""

    kind: Literal["log"] = "log"
    level: str = Field(max_length=16)
    message: str = Field(max_length=16_384)


class EventReport(Contract):
    """An event that a person should know of: a checkpoint that failed its check, a step that was skipped."""

    kind: Literal["event"] = "event"
    type: str = Field(pattern=r"^[a-z_]+(\.[a-z_]+)*$", max_length=64)
    message: str = Field(max_length=4096)
    data: dict[EventKey, EventValue] = Field(default_factory=dict, max_length=MAX_EVENT_VALUES)


class FinishedReport(Contract):
    """The last report of an attempt."""

    kind: Literal["finished"] = "finished"
    outcome: Literal["succeeded", "failed", "cancelled"]
    reason: FailureReason | None = None
    message: str | None = Field(default=None, max_length=16_384)
    summary: JobSummary | None = None


ReportBody = Annotated[
    ExporterReport
    | PhaseReport
    | StartedReport
    | StepReport
    | EvaluationReport
    | CheckpointReport
    | ExportReport
    | MeasuredReport
    | LogReport
    | EventReport
    | FinishedReport,
    Field(discriminator="kind"),
]


class Report(Contract):
    """One entry of a rank's stream."""

    seq: Step
    at: Timestamp
    body: ReportBody


class ReportBatch(Contract):
    """Consecutive reports of one rank. Only rank 0 renews the lease."""

    epoch: int = Field(ge=1)
    rank: int = Field(ge=0, lt=65_536)
    reports: tuple[Report, ...] = Field(default=(), max_length=MAX_REPORTS_PER_BATCH)


class ReportReply(Contract):
    """The control plane's answer. A rank that hears nothing for `lease_s` seconds after sending a batch stops itself."""

    desired: DesiredState
    lease_s: float
    acknowledged_seq: int
