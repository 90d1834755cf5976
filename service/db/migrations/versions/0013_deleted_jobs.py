"""Add the jobs that were deleted and may still have a folder."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "deleted_jobs",
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_deleted_jobs"),
    )
