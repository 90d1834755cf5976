"""Add the addresses where ranks serve their Prometheus metrics."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "exporters",
        sa.Column("attempt_id", sa.String(length=31), nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("address", sa.String(length=262), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_exporters_attempt_id_attempts"),
        sa.PrimaryKeyConstraint("attempt_id", "rank", name="pk_exporters"),
    )
