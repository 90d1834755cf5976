"""Add the indexes by which /metrics reads what it shows, and not all jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    live = sa.text("current_attempt_id IS NOT NULL AND finished_at IS NULL")
    ended = sa.text("finished_at IS NOT NULL")
    queued = sa.text("state = 'queued'")
    op.create_index("ix_jobs_live", "jobs", ["id"], sqlite_where=live, postgresql_where=live)
    op.create_index("ix_jobs_finished_at", "jobs", ["finished_at"], sqlite_where=ended, postgresql_where=ended)
    op.create_index("ix_jobs_pool_queued_at", "jobs", ["pool", "queued_at"], sqlite_where=queued, postgresql_where=queued)
    op.create_index("ix_attempts_state_reason", "attempts", ["state", "reason"])
