"""Keep idempotency keys apart by tenant. A key of before belongs to the tenant of its job."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("idempotency_keys", sa.Column("tenant", sa.String(length=32), nullable=False, server_default="default"))
    op.execute(
        "UPDATE idempotency_keys SET tenant = COALESCE("
        "(SELECT jobs.tenant FROM jobs WHERE jobs.id = idempotency_keys.job_id), 'default')"
    )
    with op.batch_alter_table("idempotency_keys") as table:
        table.drop_constraint("pk_idempotency_keys", type_="primary")
        table.create_primary_key("pk_idempotency_keys", ["tenant", "key"])
