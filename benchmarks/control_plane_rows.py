"""Fills a database of the control plane by SQL, for `benchmarks.control_plane`: a long queue, a long history, running jobs.

All jobs are copies of one that is queued. Their ids sort before those that the service makes.
"""

import sqlite3
from pathlib import Path

_HISTORY_S = 30 * 24 * 3600
_AT = "strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+f seconds', -({age_s}))) || '000'"
_NOW = _AT.format(age_s="0")
_RAN = {
    "num_attempts": "1",
    "step": "10",
    "steps": "10",
    "loss": "2.5",
    "tokens_per_s": "1000.0",
}


def lengthen_queue(file: Path, num_jobs: int) -> None:
    """Add queued jobs, which are older than all others."""
    _add_jobs(file, num_jobs, "000", {})


def add_history(file: Path, num_jobs: int) -> None:
    """Add jobs that ended one after the other in the last 30 days, each after one attempt."""
    at = _AT.format(age_s=f"{_HISTORY_S} * (1 - 1.0 * i / {num_jobs})")
    over = {
        "state": "CASE WHEN i % 100 < 90 THEN 'succeeded' WHEN i % 100 < 97 THEN 'failed' ELSE 'cancelled' END",
        "reason": "CASE WHEN i % 100 BETWEEN 90 AND 94 THEN 'worker_error' WHEN i % 100 IN (95, 96) THEN 'worker_lost' END",
    }
    times = dict.fromkeys(("created_at", "queued_at", "started_at", "reported_at", "finished_at"), at)
    _add_jobs(file, num_jobs, "001", over | times | _RAN)
    of_job = dict.fromkeys(("created_at", "finished_at", "released_at", "first_step_at"), "finished_at")
    _add_attempts(file, "001", of_job | {"state": "state", "reason": "reason"})


def add_running(file: Path, num_jobs: int) -> None:
    """Add jobs that run, and were heard just now."""
    times = dict.fromkeys(("created_at", "queued_at", "started_at", "reported_at"), _NOW)
    _add_jobs(file, num_jobs, "002", {"state": "'running'"} | times | _RAN)
    heard = dict.fromkeys(("created_at", "placed_at", "launched_at", "first_step_at", "last_report_at"), "created_at")
    lease = {"lease_expires_at": _AT.format(age_s="-3600"), "last_progress_at": "created_at", "token_hash": "zeroblob(32)"}
    _add_attempts(file, "002", heard | lease | {"state": "'running'"})


def _add_jobs(file: Path, num_jobs: int, prefix: str, values: dict[str, str]) -> None:
    """Copy a queued job. values: SQL of the columns that differ, in which `i` is the number of the copy."""
    with sqlite3.connect(file, timeout=60) as database:
        names = [row[1] for row in database.execute("PRAGMA table_info(jobs)")]
        if values:
            values |= {"current_attempt_id": _id("att", prefix)}
        columns = [(values | {"id": _id("job", prefix)}).get(name, f"template.{name}") for name in names]
        database.execute("CREATE TEMP TABLE template AS SELECT * FROM jobs WHERE state = 'queued' LIMIT 1")
        database.execute(
            f"WITH RECURSIVE copies(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM copies WHERE i + 1 < {num_jobs}) "
            f"INSERT INTO jobs ({', '.join(names)}) SELECT {', '.join(columns)} FROM copies, template"
        )
    database.close()


def _add_attempts(file: Path, prefix: str, values: dict[str, str]) -> None:
    """Add the attempt of each job with this prefix. values: SQL over the job's columns."""
    values |= {"id": "current_attempt_id", "job_id": "id", "epoch": "1", "pool": "pool", "workers": "1", "num_log_lines": "0"}
    with sqlite3.connect(file, timeout=60) as database:
        database.execute(
            f"INSERT INTO attempts ({', '.join(values)}) SELECT {', '.join(values.values())} FROM jobs "
            f"WHERE id LIKE 'job_{prefix}%' AND current_attempt_id IS NOT NULL"
        )
    database.close()


def _id(kind: str, prefix: str) -> str:
    """Write the SQL of an id: 26 characters after the kind, which sort by `i`."""
    return f"'{kind}_{prefix}' || printf('%08x', i) || '0123456789abcde'"
