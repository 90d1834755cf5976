"""Add the tallies: counts of jobs and attempts that triggers keep, so that nobody has to count all rows.

The triggers run in the transaction of each change, so a tally is as true as the rows, whoever writes them and in whatever
way. Each also counts its changes: as long as their sum stands still, no queue, slot or pool has changed (`store.tallies`).

On PostgreSQL two transactions that change the same tally would wait for each other until one commits, and in another order
they would deadlock. So each connection has tallies of its own: `part` is the process id of its backend, and a count is the
sum over all parts. `store.tallies.gather` adds up those of connections that have ended. SQLite has one writer, and one part.

A later migration that makes one of the three tables over again (`batch_alter_table` on SQLite) makes its triggers again.
"""

from collections.abc import Iterator

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_KEYS = "subject, pool, state, reason, part"
_FILL = (
    f"INSERT INTO tallies ({_KEYS}, num_rows, num_changes) "
    "SELECT 'job', pool, state, '', 0, COUNT(*), 1 FROM jobs GROUP BY pool, state",
    f"INSERT INTO tallies ({_KEYS}, num_rows, num_changes) "
    "SELECT 'attempt', '', state, COALESCE(reason, ''), 0, COUNT(*), 1 FROM attempts GROUP BY state, COALESCE(reason, '')",
)
"""Count the rows that were there before the triggers."""

# The key of a row, by table: its subject, pool, state and reason.
_KEY_OF = {
    "jobs": "'job', {row}.pool, {row}.state, ''",
    "attempts": "'attempt', '', {row}.state, COALESCE({row}.reason, '')",
    "pool_capacities": "'pool', {row}.pool, '', ''",
}
# The columns whose change is one of the tallies, by table. Slots are free again once an attempt is released.
_CHANGES_OF = {
    "jobs": ("pool", "state", "priority", "not_before"),
    "attempts": ("state", "reason", "released_at"),
    "pool_capacities": ("slots_present",),
}


def upgrade() -> None:
    op.create_table(
        "tallies",
        sa.Column("subject", sa.String(length=16), nullable=False),
        sa.Column("pool", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=False),
        sa.Column("part", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_changes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("subject", "pool", "state", "reason", "part", name="pk_tallies"),
    )
    connection = op.get_bind()
    for statement in (*_triggers(connection.dialect.name), *_FILL):
        connection.exec_driver_sql(statement)


def _triggers(dialect: str) -> Iterator[str]:
    if dialect == "postgresql":
        yield _POSTGRES_ADD
    for table, key in _KEY_OF.items():
        added, removed = _add(key.format(row="NEW"), 1, dialect), _add(key.format(row="OLD"), -1, dialect)
        columns = _CHANGES_OF[table]
        has_changed = " OR ".join(f"OLD.{name} IS DISTINCT FROM NEW.{name}" for name in columns)
        events = {
            "insert": ("INSERT", "", added),
            "update": (f"UPDATE OF {', '.join(columns)}", f"WHEN ({has_changed})", removed + added),
            "delete": ("DELETE", "", removed),
        }
        for name, (event, when, does) in events.items():
            trigger = f"CREATE TRIGGER tally_{table}_{name} AFTER {event} ON {table} FOR EACH ROW {when}"
            if dialect == "postgresql":
                function = f"tally_{table}_{name}"
                yield f"CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {does} RETURN NULL; END $$"
                yield f"{trigger} EXECUTE FUNCTION {function}()"
            else:
                yield f"{trigger.replace('IS DISTINCT FROM', 'IS NOT')} BEGIN {does} END"


def _add(key: str, num_rows: int, dialect: str) -> str:
    if dialect == "postgresql":
        return f"PERFORM tally_add({key}, {num_rows}); "
    return f"{_upsert(f'{key}, 0, {num_rows}, 1')}; "


def _upsert(values: str) -> str:
    return (
        f"INSERT INTO tallies ({_KEYS}, num_rows, num_changes) VALUES ({values}) ON CONFLICT ({_KEYS}) DO UPDATE SET "
        "num_rows = tallies.num_rows + excluded.num_rows, num_changes = tallies.num_changes + 1"
    )


_POSTGRES_ADD = (
    "CREATE FUNCTION tally_add(text, text, text, text, integer) RETURNS void LANGUAGE sql AS $$ "
    f"{_upsert('$1, $2, $3, $4, pg_backend_pid(), $5, 1')} $$"
)
