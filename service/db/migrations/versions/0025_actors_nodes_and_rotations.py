"""Add the actor of an event, the key that took another's place, and more of what a cluster has."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("events", sa.Column("actor", sa.Text(), nullable=True))
    op.add_column("api_keys", sa.Column("replaced_by", sa.String(length=31), nullable=True))
    op.add_column("pool_capacities", sa.Column("nodes", sa.JSON(), nullable=True))
    op.add_column("pool_capacities", sa.Column("slots_without_device", sa.Integer(), nullable=False, server_default="0"))
