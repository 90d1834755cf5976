"""The tables. A `…Row` is what is stored, a model of `api_schemas` is what is shown; `octet.service.jobs.views` converts them.

An attempt takes slots of its pool until `released_at`, the moment when its processes are known to be gone.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Enum,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from octet.api_schemas import AttemptState, DesiredState, FailureReason, JobState
from octet.api_schemas.comparison import ComparisonState
from octet.api_schemas.keys import DEFAULT_TENANT, KeyRole

S = TypeVar("S", bound=StrEnum)
NUL, REPLACEMENT = "\0", "\N{REPLACEMENT CHARACTER}"


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC. SQLite has no time zones, so it stores the UTC time as text that sorts."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else _in_utc(value)

    def bind_processor(self, dialect: Dialect) -> Callable[[datetime | None], Any]:
        """Return the conversion to what the driver takes. SQLAlchemy's own conversion for SQLite takes four times as long."""
        return _sqlite_text if dialect.name == "sqlite" else lambda value: None if value is None else _in_utc(value)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _in_utc(value: datetime) -> datetime:
    assert value.tzinfo is not None, "a moment without a time zone reached the database"
    return value if value.tzinfo is UTC else value.astimezone(UTC)


def _sqlite_text(value: datetime | None) -> str | None:
    """Render a moment as SQLAlchemy's type for SQLite does: microseconds, no time zone."""
    return None if value is None else _in_utc(value).isoformat(" ", "microseconds")[:26]


class SafeText(TypeDecorator[str]):
    """Text from outside. PostgreSQL cannot store a zero byte, so on both databases it becomes U+FFFD."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value if value is None else value.replace(NUL, REPLACEMENT)


def state_column(states: type[S]) -> Enum:
    """Make a column type that stores an enum as plain text, so a new state needs no migration."""
    return Enum(states, native_enum=False, create_constraint=False, length=32, values_callable=_values)


def _values(states: Any) -> list[str]:
    return [state.value for state in states]


def id_column() -> String:
    """Make a column type for our ids: prefix, underscore, 26 characters."""
    return String(31)


LIVE_JOB = "current_attempt_id IS NOT NULL AND finished_at IS NULL"
ENDED_JOB = "finished_at IS NOT NULL"
RUNNING = "state = 'running'"
MEASURED_JOB = "measured_to_planned IS NOT NULL"
LIVE_ATTEMPT = "state NOT IN ('succeeded', 'failed', 'cancelled')"


class Base(DeclarativeBase):
    """Base of all tables. It names every constraint, so that a migration can refer to it."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  (SQLAlchemy reads it from the class)
        datetime: UtcDateTime,
        str: SafeText,
        dict[str, Any]: JSON(none_as_null=True),
        JobState: state_column(JobState),
        DesiredState: state_column(DesiredState),
        AttemptState: state_column(AttemptState),
        FailureReason: state_column(FailureReason),
        ComparisonState: state_column(ComparisonState),
        KeyRole: state_column(KeyRole),
    }


class JobRow(Base):
    __tablename__ = "jobs"
    __table_args__ = (
        Index(
            "ix_jobs_queue",
            "pool",
            "priority",
            "id",
            sqlite_where=text("state = 'queued'"),
            postgresql_where=text("state = 'queued'"),
        ),
        Index(
            "ix_jobs_queue_of_tenant",
            "pool",
            "tenant",
            "priority",
            "id",
            sqlite_where=text("state = 'queued'"),
            postgresql_where=text("state = 'queued'"),
        ),
        Index("ix_jobs_state_pool_id", "state", "pool", "id"),
        Index("ix_jobs_name_id", "name", "id"),
        Index("ix_jobs_rows", "id", "tenant", "state", "pool", "level", "name"),
        Index("ix_jobs_best_evaluation_loss", "best_evaluation_loss", "id"),
        Index("ix_jobs_pool_measured", "pool", "id", sqlite_where=text(MEASURED_JOB), postgresql_where=text(MEASURED_JOB)),
        Index("ix_jobs_live", "id", sqlite_where=text(LIVE_JOB), postgresql_where=text(LIVE_JOB)),
        Index("ix_jobs_finished_at", "finished_at", sqlite_where=text(ENDED_JOB), postgresql_where=text(ENDED_JOB)),
        Index(
            "ix_jobs_pool_queued_at",
            "pool",
            "queued_at",
            sqlite_where=text("state = 'queued'"),
            postgresql_where=text("state = 'queued'"),
        ),
    )

    id: Mapped[str] = mapped_column(id_column(), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    tenant: Mapped[str] = mapped_column(String(32), server_default=DEFAULT_TENANT)
    state: Mapped[JobState]
    desired: Mapped[DesiredState]
    pool: Mapped[str] = mapped_column(String(32))
    workers: Mapped[int]
    min_workers: Mapped[int | None]
    priority: Mapped[int]
    level: Mapped[str] = mapped_column(String(32), server_default="")
    spec: Mapped[dict[str, Any]] = mapped_column()

    created_at: Mapped[datetime]
    queued_at: Mapped[datetime]
    not_before: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    stop_requested_at: Mapped[datetime | None] = mapped_column("cancel_requested_at")
    finished_at: Mapped[datetime | None]

    reason: Mapped[FailureReason | None]
    message: Mapped[str | None]
    summary: Mapped[dict[str, Any] | None]

    current_attempt_id: Mapped[str | None] = mapped_column(id_column())
    num_attempts: Mapped[int] = mapped_column(default=0)
    num_failures: Mapped[int] = mapped_column(default=0)
    num_platform_failures: Mapped[int] = mapped_column(default=0)
    failures: Mapped[dict[str, Any] | None]
    last_event_seq: Mapped[int] = mapped_column(BigInteger, default=0)
    last_log_seq: Mapped[int] = mapped_column(BigInteger, default=0)

    step: Mapped[int | None] = mapped_column(BigInteger)
    loss: Mapped[float | None]
    tokens_per_s: Mapped[float | None]
    remaining_s: Mapped[float | None]
    reported_at: Mapped[datetime | None]
    steps: Mapped[int | None] = mapped_column(BigInteger)
    best_evaluation_loss: Mapped[float | None]

    plan: Mapped[dict[str, Any] | None]
    measured_to_planned: Mapped[float | None]
    traceparent: Mapped[str | None] = mapped_column(String(55))
    step_time_to_planned: Mapped[float | None]

    @property
    def num_steps(self) -> int | None:
        """The job's last step, as a rank said when it started, or else as the spec says. None before epochs are counted."""
        return self.steps or self.spec["training"]["steps"]


class JobLabelRow(Base):
    __tablename__ = "job_labels"
    __table_args__ = (Index("ix_job_labels_key_value_job_id", "key", "value", "job_id"),)

    job_id: Mapped[str] = mapped_column(id_column(), ForeignKey("jobs.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str]


class AttemptRow(Base):
    __tablename__ = "attempts"
    __table_args__ = (
        UniqueConstraint("job_id", "epoch"),
        Index("ix_attempts_state_reason", "state", "reason"),
        Index("ix_attempts_finished_at_pool", "finished_at", "pool"),
        Index(
            "uq_attempts_one_live_per_job",
            "job_id",
            unique=True,
            sqlite_where=text(LIVE_ATTEMPT),
            postgresql_where=text(LIVE_ATTEMPT),
        ),
        Index(
            "ix_attempts_not_released",
            "state",
            "pool",
            sqlite_where=text("released_at IS NULL"),
            postgresql_where=text("released_at IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(id_column(), primary_key=True)
    job_id: Mapped[str] = mapped_column(id_column(), ForeignKey("jobs.id"))
    epoch: Mapped[int]
    state: Mapped[AttemptState]
    pool: Mapped[str] = mapped_column(String(32))
    workers: Mapped[int]
    token_hash: Mapped[bytes | None]

    claim_token: Mapped[str | None] = mapped_column(String(64))
    claim_expires_at: Mapped[datetime | None]
    launch_after: Mapped[datetime | None]
    launched_at: Mapped[datetime | None]
    exited_at: Mapped[datetime | None]
    released_at: Mapped[datetime | None]

    created_at: Mapped[datetime]
    placed_at: Mapped[datetime | None]
    process_up_at: Mapped[datetime | None]
    torch_imported_at: Mapped[datetime | None]
    model_built_at: Mapped[datetime | None]
    first_step_at: Mapped[datetime | None]
    warmed_up_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    last_report_at: Mapped[datetime | None]
    last_progress_at: Mapped[datetime | None]
    lease_expires_at: Mapped[datetime | None]

    node: Mapped[str | None]
    device: Mapped[str | None]
    resumed_from_step: Mapped[int | None] = mapped_column(BigInteger)
    last_step: Mapped[int | None] = mapped_column(BigInteger)
    num_log_lines: Mapped[int] = mapped_column(BigInteger, default=0)
    num_events: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    is_lent: Mapped[bool] = mapped_column(default=False, server_default=false())
    reason: Mapped[FailureReason | None]
    message: Mapped[str | None]


class EventRow(Base):
    __tablename__ = "events"
    __table_args__ = (UniqueConstraint("job_id", "seq"),)

    id: Mapped[str] = mapped_column(id_column(), primary_key=True)
    job_id: Mapped[str] = mapped_column(id_column(), ForeignKey("jobs.id"))
    seq: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime]
    type: Mapped[str] = mapped_column(String(64))
    attempt_id: Mapped[str | None] = mapped_column(id_column())
    message: Mapped[str]
    data: Mapped[dict[str, Any]]
    actor: Mapped[str | None]


class CurvePartRow(Base):
    """Steps of a job's curve that one attempt reported together. `store.curves` says what is packed."""

    __tablename__ = "curve_parts"

    job_id: Mapped[str] = mapped_column(id_column(), ForeignKey("jobs.id"), primary_key=True)
    last_step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    first_step: Mapped[int] = mapped_column(BigInteger)
    num_steps: Mapped[int]
    attempt_id: Mapped[str] = mapped_column(id_column())
    packed: Mapped[bytes]


class EvaluationRow(Base):
    """An evaluation after a step of a job's curve."""

    __tablename__ = "evaluations"

    job_id: Mapped[str] = mapped_column(id_column(), ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    loss: Mapped[float | None]
    metrics: Mapped[dict[str, Any]]


class MeasurementRow(Base):
    """The last measurements of a job by its rank 0: its size, the bytes that it holds, and its worst layers in FP8."""

    __tablename__ = "measurements"

    job_id: Mapped[str] = mapped_column(id_column(), ForeignKey("jobs.id"), primary_key=True)
    attempt_id: Mapped[str] = mapped_column(id_column())
    at: Mapped[datetime]
    step: Mapped[int] = mapped_column(BigInteger)
    num_parameters: Mapped[int] = mapped_column(BigInteger)
    num_layers_converted: Mapped[int] = mapped_column(BigInteger)
    num_layers_filtered: Mapped[int] = mapped_column(BigInteger)
    num_layers_skipped: Mapped[int] = mapped_column(BigInteger)
    memory: Mapped[dict[str, Any] | None]
    layers: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))


class CheckpointRow(Base):
    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("job_id", "step"),)

    id: Mapped[str] = mapped_column(id_column(), primary_key=True)
    job_id: Mapped[str] = mapped_column(id_column(), ForeignKey("jobs.id"))
    attempt_id: Mapped[str] = mapped_column(id_column())
    step: Mapped[int] = mapped_column(BigInteger)
    name: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    loss: Mapped[float | None]


class ExportRow(Base):
    __tablename__ = "exports"
    __table_args__ = (UniqueConstraint("job_id", "name"),)

    id: Mapped[str] = mapped_column(id_column(), primary_key=True)
    job_id: Mapped[str] = mapped_column(id_column(), ForeignKey("jobs.id"))
    attempt_id: Mapped[str] = mapped_column(id_column())
    step: Mapped[int] = mapped_column(BigInteger)
    name: Mapped[str] = mapped_column(String(64))
    format: Mapped[str] = mapped_column(String(32))
    layout: Mapped[str] = mapped_column(String(32))
    activations: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[datetime]
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    address: Mapped[str | None] = mapped_column(String(2048))
    mismatch: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class LogLineRow(Base):
    __tablename__ = "log_lines"

    job_id: Mapped[str] = mapped_column(id_column(), ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    attempt_id: Mapped[str] = mapped_column(id_column())
    rank: Mapped[int]
    level: Mapped[str]
    message: Mapped[str]


class ReportStreamRow(Base):
    """The sequence number of the last report of one rank that was applied."""

    __tablename__ = "report_streams"

    attempt_id: Mapped[str] = mapped_column(id_column(), ForeignKey("attempts.id"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    last_seq: Mapped[int] = mapped_column(BigInteger)


class ExporterRow(Base):
    """The address where a rank serves its Prometheus metrics."""

    __tablename__ = "exporters"

    attempt_id: Mapped[str] = mapped_column(id_column(), ForeignKey("attempts.id"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    address: Mapped[str] = mapped_column(String(262))


class IdempotencyKeyRow(Base):
    __tablename__ = "idempotency_keys"

    tenant: Mapped[str] = mapped_column(String(32), primary_key=True, server_default=DEFAULT_TENANT)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(id_column())
    expires_at: Mapped[datetime] = mapped_column(index=True)


class DeletedJobRow(Base):
    """A job that was deleted, until a loop of the dispatcher has deleted its folder too."""

    __tablename__ = "deleted_jobs"

    job_id: Mapped[str] = mapped_column(id_column(), primary_key=True)
    deleted_at: Mapped[datetime]


class DeletedUseRow(Base):
    """The slots that an attempt of a deleted job had, until its month is over: they count in its tenant's slot hours."""

    __tablename__ = "deleted_uses"

    attempt_id: Mapped[str] = mapped_column(id_column(), primary_key=True)
    pool: Mapped[str] = mapped_column(String(32))
    tenant: Mapped[str] = mapped_column(String(32))
    workers: Mapped[int]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime]


class DeletedFilesRow(Base):
    """A checkpoint or an export that was deleted, until a loop of the dispatcher has deleted its folder too."""

    __tablename__ = "deleted_files"

    job_id: Mapped[str] = mapped_column(id_column(), ForeignKey("jobs.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)


class ComparisonRow(Base):
    """A comparison. spec: as it was asked for. queues_more: children are to be queued once fewer are alive than may be."""

    __tablename__ = "comparisons"
    __table_args__ = (Index("ix_comparisons_running", "id", sqlite_where=text(RUNNING), postgresql_where=text(RUNNING)),)

    id: Mapped[str] = mapped_column(id_column(), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    tenant: Mapped[str] = mapped_column(String(32))
    state: Mapped[ComparisonState]
    message: Mapped[str | None]
    spec: Mapped[dict[str, Any]] = mapped_column()
    queues_more: Mapped[bool]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    traceparent: Mapped[str | None] = mapped_column(String(55))


class ComparisonChildRow(Base):
    """A job of a comparison. It outlives the job, which may be deleted: so `job_id` refers to no row."""

    __tablename__ = "comparison_children"

    comparison_id: Mapped[str] = mapped_column(id_column(), ForeignKey("comparisons.id"), primary_key=True)
    arm: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    seed: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    job_id: Mapped[str] = mapped_column(id_column())
    outcome: Mapped[dict[str, Any] | None]


class ApiKeyRow(Base):
    """A key that a person or a service of a tenant sends with its requests. Its secret is not stored."""

    __tablename__ = "api_keys"
    __table_args__ = (UniqueConstraint("secret_hash"),)

    id: Mapped[str] = mapped_column(id_column(), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    tenant: Mapped[str] = mapped_column(String(32))
    role: Mapped[KeyRole]
    secret_hash: Mapped[bytes]
    created_at: Mapped[datetime]
    created_by: Mapped[str]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    used_at: Mapped[datetime | None]
    replaced_by: Mapped[str | None] = mapped_column(id_column())


class AuditRow(Base):
    """A request that was to change something, or that was refused for its key. Rows are added, and nothing changes them."""

    __tablename__ = "audit_records"
    __table_args__ = (Index("ix_audit_records_tenant_id", "tenant", "id"),)

    id: Mapped[str] = mapped_column(id_column(), primary_key=True)
    at: Mapped[datetime]
    actor: Mapped[str | None]
    tenant: Mapped[str | None] = mapped_column(String(32))
    method: Mapped[str] = mapped_column(String(16))
    path: Mapped[str]
    address: Mapped[str]
    request_id: Mapped[str] = mapped_column(String(64))
    status: Mapped[int]


class LeaseRow(Base):
    """The dispatcher that leads. A holder that does not renew in time loses the lease to the next one that asks."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    holder: Mapped[str] = mapped_column(String(255))
    token: Mapped[str] = mapped_column(String(64))
    expires_at: Mapped[datetime]


class LastStartRow(Base):
    """The moment when a tenant last had a job placed in a pool. Of tenants with equal use the one with the oldest is next."""

    __tablename__ = "last_starts"

    pool: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(32), primary_key=True)
    started_at: Mapped[datetime]


class PoolCapacityRow(Base):
    """The slots of a pool, as the cluster last counted them, those too that lack a device, and the addresses of all nodes."""

    __tablename__ = "pool_capacities"

    pool: Mapped[str] = mapped_column(String(32), primary_key=True)
    slots_present: Mapped[int]
    observed_at: Mapped[datetime]
    nodes: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    slots_without_device: Mapped[int] = mapped_column(default=0, server_default="0")


class TallyRow(Base):
    """Counts of jobs, attempts and pools by kind. Triggers keep them (`octet.service.db.triggers`)."""

    __tablename__ = "tallies"

    subject: Mapped[str] = mapped_column(String(16), primary_key=True)
    pool: Mapped[str] = mapped_column(String(32), primary_key=True)
    state: Mapped[str] = mapped_column(String(32), primary_key=True)
    reason: Mapped[str] = mapped_column(String(32), primary_key=True)
    part: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    num_rows: Mapped[int] = mapped_column(BigInteger)
    num_changes: Mapped[int] = mapped_column(BigInteger)
