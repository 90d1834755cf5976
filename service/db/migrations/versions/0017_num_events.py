"""Count the events that the ranks of an attempt cause."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("num_events", sa.BigInteger(), nullable=False, server_default="0"))
