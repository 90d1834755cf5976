"""Index the queue by tenant, and add the last starts of tenants and the slots that are lent."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    queued = sa.text("state = 'queued'")
    columns = ["pool", "tenant", "priority", "id"]
    op.create_index("ix_jobs_queue_of_tenant", "jobs", columns, sqlite_where=queued, postgresql_where=queued)
    op.create_table(
        "last_starts",
        sa.Column("pool", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("pool", "tenant", name="pk_last_starts"),
    )
    op.add_column("attempts", sa.Column("is_lent", sa.Boolean(), nullable=False, server_default=sa.false()))
