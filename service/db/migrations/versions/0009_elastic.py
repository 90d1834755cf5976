"""Add the smallest number of ranks of an elastic job."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("min_workers", sa.Integer(), nullable=True))
