"""Add the time at which an attempt had compiled its model."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("warmed_up_at", sa.DateTime(timezone=True), nullable=True))
