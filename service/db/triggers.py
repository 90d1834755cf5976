"""The triggers that keep the tallies: counts of jobs and attempts, so that nobody has to count all rows.

They run in the transaction of each change, so a tally is as true as the rows, whoever writes them and in whatever way. Each
also counts its changes: as long as their sum stands still, no queue, slot or pool has changed (`store.tallies`).

On PostgreSQL two transactions that change the same tally would wait for each other until one commits, and in another order
they would deadlock. So each connection has tallies of its own: `part` is the process id of its backend, and a count is the
sum over all parts. `store.tallies.gather` adds up those of connections that have ended. SQLite has one writer, and one part.

A migration that makes one of the three tables over again (`batch_alter_table` on SQLite) makes its triggers again.
"""

from collections.abc import Iterator

_KEYS = "subject, pool, state, reason, part"
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


def triggers(dialect: str) -> Iterator[str]:
    """Yield the statements that make the triggers of an empty database."""
    is_postgres = dialect == "postgresql"
    if is_postgres:
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
            trigger = f"CREATE TRIGGER tally_{table}_{name} AFTER {event} ON {table}"
            rows = f"FOR EACH ROW {when}"
            if not is_postgres:
                yield f"{trigger} {rows.replace('IS DISTINCT FROM', 'IS NOT')} BEGIN {does} END"
                continue
            if (table, name) == ("jobs", "insert"):
                rows, does = "REFERENCING NEW TABLE AS added FOR EACH STATEMENT", _ADD_JOBS
            function = f"tally_{table}_{name}()"
            yield f"CREATE FUNCTION {function} RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {does} RETURN NULL; END $$"
            yield f"{trigger} {rows} EXECUTE FUNCTION {function}"


def _add(key: str, num_rows: int, dialect: str) -> str:
    if dialect == "postgresql":
        return f"PERFORM tally_add({key}, {num_rows}); "
    return f"{_upsert(f'VALUES ({key}, 0, {num_rows}, 1)')}; "


def _upsert(rows: str) -> str:
    return (
        f"INSERT INTO tallies ({_KEYS}, num_rows, num_changes) {rows} ON CONFLICT ({_KEYS}) DO UPDATE SET "
        "num_rows = tallies.num_rows + excluded.num_rows, num_changes = tallies.num_changes + excluded.num_changes"
    )


_POSTGRES_ADD = (
    "CREATE FUNCTION tally_add(text, text, text, text, integer) RETURNS void LANGUAGE sql AS $$ "
    f"{_upsert('VALUES ($1, $2, $3, $4, pg_backend_pid(), $5, 1)')} $$"
)
# A trigger for each job was a quarter of the time of the statement that adds 16. SQLite has none of statements.
_ADD_JOBS = _upsert("SELECT 'job', pool, state, '', pg_backend_pid(), COUNT(*), COUNT(*) FROM added GROUP BY pool, state") + ";"
