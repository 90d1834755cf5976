"""Add what a list of jobs shows and is filtered by, and the measurements of running jobs.

`ix_jobs_rows` holds every column that a list is filtered by: it is walked in place of the rows, which are some KB each.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_LEVEL = {
    "sqlite": "COALESCE(json_extract(spec, '$.precision.level'), '')",
    "postgresql": "COALESCE(spec #>> '{precision,level}', '')",
}
_BEST = "(SELECT MIN(loss) FROM evaluations WHERE evaluations.job_id = jobs.id)"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("level", sa.String(length=32), nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("best_evaluation_loss", sa.Double(), nullable=True))
    connection = op.get_bind()
    level = _LEVEL[connection.dialect.name]
    connection.exec_driver_sql(f"UPDATE jobs SET level = {level}, best_evaluation_loss = {_BEST}")
    op.create_index("ix_jobs_rows", "jobs", ["id", "tenant", "state", "pool", "level", "name"])
    op.create_index("ix_jobs_best_evaluation_loss", "jobs", ["best_evaluation_loss", "id"])
    op.create_table(
        "measurements",
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("attempt_id", sa.String(length=31), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("num_parameters", sa.BigInteger(), nullable=False),
        sa.Column("num_layers_converted", sa.BigInteger(), nullable=False),
        sa.Column("num_layers_filtered", sa.BigInteger(), nullable=False),
        sa.Column("num_layers_skipped", sa.BigInteger(), nullable=False),
        sa.Column("memory", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("layers", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_measurements_job_id_jobs"),
        sa.PrimaryKeyConstraint("job_id", name="pk_measurements"),
    )
