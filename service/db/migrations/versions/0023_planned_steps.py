"""Add the time of a job's measured steps, over the middle of the range that its plan predicted."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("step_time_to_planned", sa.Double(), nullable=True))
