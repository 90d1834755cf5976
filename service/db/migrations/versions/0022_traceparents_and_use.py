"""Add the traceparent of the request that submitted a job or a comparison; those from before have none. Add the use of deleted
jobs, which counts in the month's slot hours of their tenants, and the index by which a month's attempts are found.
"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("jobs", "comparisons"):
        op.add_column(table, sa.Column("traceparent", sa.String(55), nullable=True))
    op.create_table(
        "deleted_uses",
        sa.Column("attempt_id", sa.String(31), nullable=False),
        sa.Column("pool", sa.String(32), nullable=False),
        sa.Column("tenant", sa.String(32), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("attempt_id", name="pk_deleted_uses"),
    )
    op.create_index("ix_attempts_finished_at_pool", "attempts", ["finished_at", "pool"])
