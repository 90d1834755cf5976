"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("body_hash", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_expires_at", "idempotency_keys", ["expires_at"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=31), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("desired", sa.String(length=32), nullable=False),
        sa.Column("pool", sa.String(length=32), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("reason", sa.String(length=32), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("summary", sa.JSON(), nullable=True),
        sa.Column("current_attempt_id", sa.String(length=31), nullable=True),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("num_failures", sa.Integer(), nullable=False),
        sa.Column("num_platform_failures", sa.Integer(), nullable=False),
        sa.Column("last_event_seq", sa.BigInteger(), nullable=False),
        sa.Column("last_log_seq", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("tokens_per_s", sa.Double(), nullable=True),
        sa.Column("remaining_s", sa.Double(), nullable=True),
        sa.Column("reported_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_name_id", "jobs", ["name", "id"], unique=False)
    op.create_index(
        "ix_jobs_queue",
        "jobs",
        ["pool", "priority", "id"],
        unique=False,
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index("ix_jobs_state_pool_id", "jobs", ["state", "pool", "id"], unique=False)
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("holder", sa.String(length=255), nullable=False),
        sa.Column("token", sa.String(length=64), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "pool_capacities",
        sa.Column("pool", sa.String(length=32), nullable=False),
        sa.Column("slots_present", sa.Integer(), nullable=False),
        sa.Column("observed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("pool", name="pk_pool_capacities"),
    )
    op.create_table(
        "attempts",
        sa.Column("id", sa.String(length=31), nullable=False),
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("pool", sa.String(length=32), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("token_hash", sa.LargeBinary(), nullable=True),
        sa.Column("claim_token", sa.String(length=64), nullable=True),
        sa.Column("claim_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("launch_after", sa.DateTime(timezone=True), nullable=True),
        sa.Column("launched_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("exited_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("released_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("placed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("process_up_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("torch_imported_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("model_built_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("first_step_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_report_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_progress_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("resumed_from_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("num_log_lines", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_attempts_job_id_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_attempts"),
        sa.UniqueConstraint("job_id", "epoch", name="uq_attempts_job_id_epoch"),
    )
    op.create_index(
        "ix_attempts_not_released",
        "attempts",
        ["state", "pool"],
        unique=False,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_index(
        "uq_attempts_one_live_per_job",
        "attempts",
        ["job_id"],
        unique=True,
        sqlite_where=sa.text("state NOT IN ('succeeded', 'failed', 'cancelled')"),
        postgresql_where=sa.text("state NOT IN ('succeeded', 'failed', 'cancelled')"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(length=31), nullable=False),
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("attempt_id", sa.String(length=31), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_checkpoints_job_id_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
        sa.UniqueConstraint("job_id", "step", name="uq_checkpoints_job_id_step"),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.String(length=31), nullable=False),
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("attempt_id", sa.String(length=31), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sa.UniqueConstraint("job_id", "seq", name="uq_events_job_id_seq"),
    )
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_labels_job_id_jobs"),
        sa.PrimaryKeyConstraint("job_id", "key", name="pk_job_labels"),
    )
    op.create_index("ix_job_labels_key_value_job_id", "job_labels", ["key", "value", "job_id"], unique=False)
    op.create_table(
        "log_lines",
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("attempt_id", sa.String(length=31), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_log_lines_job_id_jobs"),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_log_lines"),
    )
    op.create_table(
        "metrics",
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("attempt_id", sa.String(length=31), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("gradient_norm", sa.Double(), nullable=True),
        sa.Column("learning_rate", sa.Double(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("step_time_s", sa.Double(), nullable=False),
        sa.Column("data_wait_s", sa.Double(), nullable=False),
        sa.Column("evaluation_loss", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_metrics_job_id_jobs"),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_metrics"),
    )
    op.create_table(
        "report_streams",
        sa.Column("attempt_id", sa.String(length=31), nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_report_streams_attempt_id_attempts"),
        sa.PrimaryKeyConstraint("attempt_id", "rank", name="pk_report_streams"),
    )
