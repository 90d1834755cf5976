"""SQL of the tallies: counts of jobs and attempts, and of changes, without counting.

Triggers keep them; see `octet.service.db.triggers`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from octet.api_schemas import AttemptState, FailureReason, JobState
from octet.service.db.bulk import Transaction, connection_of, run


@dataclass(frozen=True)
class Tallies:
    """The counts that a transaction sees.

    `version` grows with every change of a job's place in the queue, of an attempt's slots and of a pool's capacity: two
    transactions that see the same version see the same queue. `jobs` are counts by pool and state, `attempts` by state and
    reason, `deleted_attempts` those that went with their jobs; counts of zero are left out.
    """

    version: int
    jobs: dict[tuple[str, JobState], int]
    attempts: dict[tuple[AttemptState, FailureReason | None], int]
    deleted_attempts: dict[tuple[AttemptState, FailureReason | None], int] = field(default_factory=dict)


def read(transaction: Transaction) -> Tallies:
    """Read all tallies."""
    return _of(run(connection_of(transaction), _ALL))


def _of(rows: Iterable[tuple[Any, ...]]) -> Tallies:
    version = 0
    jobs: dict[tuple[str, JobState], int] = {}
    attempts: dict[str, dict[tuple[AttemptState, FailureReason | None], int]] = {"attempt": {}, _DELETED: {}}
    for subject, pool, state, reason, num_rows, num_changes in rows:
        version += int(num_changes)
        if subject == "job" and num_rows:
            jobs[pool, JobState(state)] = int(num_rows)
        elif subject in attempts and num_rows:
            attempts[subject][AttemptState(state), FailureReason(reason) if reason else None] = int(num_rows)
    return Tallies(version, jobs, attempts["attempt"], attempts[_DELETED])


def note_deleted(session: Session, job_id: str) -> None:
    """Count the attempts of a job that is about to be deleted, so that what counts all that ever ended does not fall."""
    part = "pg_backend_pid()" if session.get_bind().dialect.name == "postgresql" else "0"
    session.execute(text(_NOTE_DELETED.format(part=part)), {"job_id": job_id})


_DELETED = "deleted_attempt"
_NOTE_DELETED = f"""
    INSERT INTO tallies (subject, pool, state, reason, part, num_rows, num_changes)
    SELECT '{_DELETED}', '', state, COALESCE(reason, ''), {{part}}, COUNT(*), 0 FROM attempts WHERE job_id = :job_id
    GROUP BY state, COALESCE(reason, '')
    ON CONFLICT (subject, pool, state, reason, part) DO UPDATE SET num_rows = tallies.num_rows + excluded.num_rows
    """
_SUMS = "subject, pool, state, reason, SUM(num_rows), SUM(num_changes)"
_OF_EACH = "FROM tallies GROUP BY subject, pool, state, reason"
_ALL = f"SELECT {_SUMS} {_OF_EACH}"


def gather(session: Session) -> None:
    """Add up the tallies of database connections that have ended. SQLite has nothing to gather."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(_GATHER)


_GATHER = text(
    """
    WITH ended AS (
        DELETE FROM tallies WHERE part <> 0 AND part NOT IN (SELECT pid FROM pg_stat_activity) RETURNING *
    )
    INSERT INTO tallies (subject, pool, state, reason, part, num_rows, num_changes)
    SELECT subject, pool, state, reason, 0, SUM(num_rows), SUM(num_changes) FROM ended GROUP BY subject, pool, state, reason
    ON CONFLICT (subject, pool, state, reason, part) DO UPDATE
    SET num_rows = tallies.num_rows + excluded.num_rows, num_changes = tallies.num_changes + excluded.num_changes
    """
)
