"""Add the steps of a job whose epochs a rank has counted, and the values that an evaluation measures besides the loss."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("steps", sa.BigInteger(), nullable=True))
    op.add_column("metrics", sa.Column("evaluation_metrics", sa.JSON(), nullable=True))
