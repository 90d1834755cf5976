"""Add the address of an export's copy in an object store."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("exports", sa.Column("address", sa.String(length=2048), nullable=True))
