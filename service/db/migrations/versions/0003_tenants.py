"""Add the tenant of a job, which comes from the API key that submitted it."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("tenant", sa.String(length=32), nullable=False, server_default="default"))
