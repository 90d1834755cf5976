"""Add the plans of jobs, and how much of them was measured."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("plan", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("jobs", sa.Column("measured_to_planned", sa.Double(), nullable=True))
    measured = sa.text("measured_to_planned IS NOT NULL")
    op.create_index("ix_jobs_pool_measured", "jobs", ["pool", "id"], sqlite_where=measured, postgresql_where=measured)
