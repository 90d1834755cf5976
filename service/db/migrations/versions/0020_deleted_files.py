"""Add the folders of checkpoints and exports that were deleted and whose files are still to go."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "deleted_files",
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_deleted_files_job_id_jobs"),
        sa.PrimaryKeyConstraint("job_id", "kind", "name", name="pk_deleted_files"),
    )
