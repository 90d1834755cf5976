"""Add the traceparent of the request that submitted a job or a comparison. Those from before have none."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("jobs", "comparisons"):
        op.add_column(table, sa.Column("traceparent", sa.String(55), nullable=True))
