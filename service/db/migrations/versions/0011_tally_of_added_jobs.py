"""Count the jobs that one statement adds together: one change of a tally where there was one for each job.

On PostgreSQL the trigger of each job was a quarter of the time of the statement that adds 16. SQLite has no triggers of
statements, and keeps those of rows. `num_changes` still grows by one for each job.
"""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_COUNT = """
CREATE OR REPLACE FUNCTION tally_jobs_insert() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO tallies (subject, pool, state, reason, part, num_rows, num_changes)
    SELECT 'job', pool, state, '', pg_backend_pid(), COUNT(*), COUNT(*) FROM added GROUP BY pool, state
    ON CONFLICT (subject, pool, state, reason, part) DO UPDATE SET
        num_rows = tallies.num_rows + excluded.num_rows, num_changes = tallies.num_changes + excluded.num_changes;
    RETURN NULL;
END $$
"""
_TRIGGER = """
CREATE TRIGGER tally_jobs_insert AFTER INSERT ON jobs REFERENCING NEW TABLE AS added
FOR EACH STATEMENT EXECUTE FUNCTION tally_jobs_insert()
"""


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        for statement in ("DROP TRIGGER tally_jobs_insert ON jobs", _COUNT, _TRIGGER):
            connection.exec_driver_sql(statement)
