"""Add comparisons and their children."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_RUNNING = sa.text("state = 'running'")


def upgrade() -> None:
    op.create_table(
        "comparisons",
        sa.Column("id", sa.String(length=31), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("queues_more", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_comparisons"),
    )
    op.create_index("ix_comparisons_running", "comparisons", ["id"], sqlite_where=_RUNNING, postgresql_where=_RUNNING)
    op.create_table(
        "comparison_children",
        sa.Column("comparison_id", sa.String(length=31), nullable=False),
        sa.Column("arm", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("outcome", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(["comparison_id"], ["comparisons.id"], name="fk_comparison_children_comparison_id_comparisons"),
        sa.PrimaryKeyConstraint("comparison_id", "arm", "seed", name="pk_comparison_children"),
    )
