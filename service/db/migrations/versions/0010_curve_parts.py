"""Store curves in parts instead of a row for each step, and evaluations in a table of their own.

The steps that are there become parts of at most 1,000 steps, so memory holds no more of them at once. All of it is one
transaction, as each migration: a process that is killed in it leaves the table as it was. What is packed is written here
again as `octet.service.store.curves` had it when this migration was made.
"""

import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from math import nan
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_STEPS_PER_PART = 1000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_OLD = sa.table(
    "metrics",
    *(sa.column(name) for name in ("job_id", "attempt_id", "loss", "gradient_norm", "learning_rate", "step_time_s")),
    *(sa.column(name) for name in ("step", "tokens", "data_wait_s", "evaluation_loss")),
    sa.column("at", sa.DateTime(timezone=True)),
    sa.column("evaluation_metrics", sa.JSON()),
)


def upgrade() -> None:
    parts = op.create_table(
        "curve_parts",
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("last_step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("num_steps", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.String(length=31), nullable=False),
        sa.Column("packed", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_curve_parts_job_id_jobs"),
        sa.PrimaryKeyConstraint("job_id", "last_step", name="pk_curve_parts"),
    )
    evaluations = op.create_table(
        "evaluations",
        sa.Column("job_id", sa.String(length=31), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_evaluations_job_id_jobs"),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_evaluations"),
    )
    connection = op.get_bind()
    for rows in _pages(connection):
        for (job_id, attempt_id), of_attempt in groupby(rows, lambda row: (row.job_id, row.attempt_id)):
            connection.execute(sa.insert(parts).values(_part(job_id, attempt_id, list(of_attempt))))
        evaluated = [_evaluation(row) for row in rows if (row.evaluation_loss, row.evaluation_metrics) != (None, None)]
        if evaluated:
            connection.execute(sa.insert(evaluations), evaluated)
    op.drop_table("metrics")


def _pages(connection: sa.Connection) -> Iterator[Sequence[Any]]:
    """Read the old table in the order of its key, so many rows at a time."""
    query = sa.select(_OLD).order_by(_OLD.c.job_id, _OLD.c.step).limit(_STEPS_PER_PART)
    rows = connection.execute(query).all()
    while rows:
        yield rows
        last = sa.tuple_(sa.literal(rows[-1].job_id), sa.literal(rows[-1].step, sa.BigInteger()))
        rows = connection.execute(query.where(sa.tuple_(_OLD.c.job_id, _OLD.c.step) > last)).all()


def _part(job_id: str, attempt_id: str, rows: Sequence[Any]) -> dict[str, Any]:
    integers = ([row.step for row in rows], [_microseconds(row.at) for row in rows], [row.tokens for row in rows])
    names = ("loss", "gradient_norm", "learning_rate", "step_time_s", "data_wait_s")
    floats = [[nan if (value := getattr(row, name)) is None else value for row in rows] for name in names]
    numbers = [number for column in (*integers, *floats) for number in column]
    return {
        "job_id": job_id,
        "last_step": rows[-1].step,
        "first_step": rows[0].step,
        "num_steps": len(rows),
        "attempt_id": attempt_id,
        "packed": struct.pack(f"<{3 * len(rows)}q{5 * len(rows)}d", *numbers),
    }


def _evaluation(row: Any) -> dict[str, Any]:
    return {"job_id": row.job_id, "step": row.step, "loss": row.evaluation_loss, "metrics": row.evaluation_metrics or {}}


def _microseconds(moment: datetime) -> int:
    """Count from 1970. SQLite stores moments in UTC without saying so."""
    in_utc = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return (in_utc - _EPOCH) // timedelta(microseconds=1)
