"""Add the failures of a job by reason. Those from before are not divided: a job that lives begins with its whole budgets."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("failures", sa.JSON(none_as_null=True), nullable=True))
