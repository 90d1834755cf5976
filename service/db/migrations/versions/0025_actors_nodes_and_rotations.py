"""Add the actor of an event, and the addresses of a cluster's nodes."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("events", sa.Column("actor", sa.Text(), nullable=True))
    op.add_column("pool_capacities", sa.Column("nodes", sa.JSON(), nullable=True))
