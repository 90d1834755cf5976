"""Add the exports of jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "exports",
        sa.Column("id", sa.String(length=31), nullable=False),
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("attempt_id", sa.String(length=31), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("format", sa.String(length=32), nullable=False),
        sa.Column("layout", sa.String(length=32), nullable=False),
        sa.Column("activations", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("mismatch", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_exports_job_id_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_exports"),
        sa.UniqueConstraint("job_id", "name", name="uq_exports_job_id_name"),
    )
