"""Invariants of the database and the cluster. They hold at every instant, no matter what died."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from octet.api_schemas import AttemptRef, AttemptState, DesiredState, JobState
from octet.service import store
from octet.service.db.bulk import Transaction, connection_of, run
from octet.service.db.tables import AttemptRow, EventRow, JobRow, LogLineRow
from tests.service.world import World

_LIVE = {JobState.STARTING, JobState.RUNNING, JobState.PAUSING, JobState.CANCELLING}
_DESIRED = {
    JobState.QUEUED: {DesiredState.RUN},
    JobState.STARTING: {DesiredState.RUN},
    JobState.RUNNING: {DesiredState.RUN},
    JobState.PAUSING: {DesiredState.PAUSE},
    JobState.PAUSED: {DesiredState.PAUSE},
    JobState.CANCELLING: {DesiredState.CANCEL, DesiredState.CANCEL_NOW},
    JobState.CANCELLED: {DesiredState.CANCEL, DesiredState.CANCEL_NOW},
}
"""The states that may be desired of a job in a state; any of a job that has succeeded or failed."""
# Columns in place of entities, and plain SQL for the numbers: a random life reads this after each transition that wrote.
_JOBS = select(
    JobRow.id,
    JobRow.pool,
    JobRow.state,
    JobRow.desired,
    JobRow.num_attempts,
    JobRow.finished_at,
    JobRow.last_event_seq,
    JobRow.last_log_seq,
)
_ATTEMPTS = select(
    AttemptRow.id,
    AttemptRow.job_id,
    AttemptRow.epoch,
    AttemptRow.pool,
    AttemptRow.state,
    AttemptRow.reason,
    AttemptRow.workers,
    AttemptRow.released_at,
    AttemptRow.lease_expires_at,
).order_by(AttemptRow.epoch)


class Kept(NamedTuple):
    """The database's jobs and attempts, and the number of transactions that had written when they were read."""

    num_writes: int | None
    jobs: list[Row[Any]]
    attempts: dict[str, list[Row[Any]]]
    """By job, in the order of their epochs."""


def check_invariants(world: World, known: Kept | None = None, num_writes: int | None = None) -> Kept:
    """Check all invariants, and return what was read.

    known: what an earlier check returned. If `num_writes`, the number of transactions that have written until now, is still
    the same, the rows are too, and only what depends on the cluster and the time is checked again.
    """
    if known is None or num_writes is None or known.num_writes != num_writes:
        before, known = known, _check_rows(world, num_writes)
        if before is not None:
            _check_history(before, known, world.deleted)
    for attempts in known.attempts.values():
        assert sum(_is_alive(world, attempt) for attempt in attempts) <= 1, "two attempts of a job may train at once"
    return known


def _check_rows(world: World, num_writes: int | None) -> Kept:
    with world.database.read() as session:
        connection = session.connection()
        jobs = [*connection.execute(_JOBS)]
        by_job: dict[str, list[Row[Any]]] = defaultdict(list)
        held: Counter[str] = Counter()
        for attempt in connection.execute(_ATTEMPTS):
            by_job[attempt.job_id].append(attempt)
            held[attempt.pool] += attempt.workers * (attempt.released_at is None)
        events, lines = numbers_by_job(connection, EventRow), numbers_by_job(connection, LogLineRow)
        for job in jobs:
            assert events[job.id] == list(range(1, job.last_event_seq + 1)), "event numbers have gaps"
            assert lines[job.id] == list(range(1, job.last_log_seq + 1)), "log numbers have gaps"
            _check_attempts(job, by_job[job.id])
        assert all(held[pool.name] <= pool.slots for pool in world.settings.pools), "more slots are given than there are"
        attempts = [attempt for each in by_job.values() for attempt in each]
        _compare_tallies(connection, ((job.pool, job.state) for job in jobs), ((each.state, each.reason) for each in attempts))
    return Kept(num_writes, jobs, dict(by_job))


def _check_history(before: Kept, after: Kept, deleted: set[str]) -> None:
    """Check that what was over stays as it was, and only what somebody deleted is gone, all of it."""
    jobs = {job.id: job for job in after.jobs}
    attempts = {attempt.id: attempt for each in after.attempts.values() for attempt in each}
    gone = {job.id for job in before.jobs} - jobs.keys()
    assert gone <= deleted, "a job is lost"
    assert not gone & after.attempts.keys(), "a job is gone and its attempts are not"
    for job in (job for job in before.jobs if job.id not in gone):
        now = jobs[job.id]
        is_retried = not now.state.is_terminal or now.num_attempts > job.num_attempts
        is_same = {**now._mapping, "last_event_seq": 0} == {**job._mapping, "last_event_seq": 0}  # labels change later
        assert not job.state.is_terminal or is_same or is_retried, "a job changed after its end"
    kept = [attempt for job_id, each in before.attempts.items() if job_id not in gone for attempt in each]
    for attempt in (attempt for attempt in kept if attempt.state.is_terminal):
        now = attempts[attempt.id]
        assert (now.state, now.reason) == (attempt.state, attempt.reason), "an attempt changed after its end"
        assert now.lease_expires_at == attempt.lease_expires_at, "a lease was renewed after its attempt's end"
        assert attempt.released_at in {None, now.released_at}, "an attempt was released twice"


def check_tallies(session: Session) -> None:
    """Check that the kept counts are those of the rows."""
    jobs = session.execute(select(JobRow.pool, JobRow.state))
    attempts = session.execute(select(AttemptRow.state, AttemptRow.reason))
    _compare_tallies(session, map(tuple, jobs), map(tuple, attempts))


def _compare_tallies(transaction: Transaction, jobs: Iterator[Any], attempts: Iterator[Any]) -> None:
    tallies = store.tallies.read(transaction)
    assert tallies.jobs == Counter(jobs), "the tallies of jobs are not those of the rows"
    assert tallies.attempts == Counter(attempts), "the tallies of attempts are not those of the rows"


def _check_attempts(job: Row[Any], attempts: list[Row[Any]]) -> None:
    """Check that a job's attempts, in the order of their epochs, fit to its state and to each other."""
    assert [attempt.epoch for attempt in attempts] == list(range(1, job.num_attempts + 1)), "attempts are missing or doubled"
    live = [attempt for attempt in attempts if not attempt.state.is_terminal]
    assert len(live) == (job.state in _LIVE), "the number of live attempts does not fit to the job's state"
    assert all(attempt is attempts[-1] for attempt in live), "an attempt lives that is not the last"
    assert all(attempt.state.is_terminal for attempt in attempts if attempt.released_at is not None)
    assert (job.state is JobState.RUNNING) <= any(attempt.state is AttemptState.RUNNING for attempt in live)
    assert (job.finished_at is not None) == job.state.is_terminal
    assert job.desired in _DESIRED.get(job.state, set(DesiredState)), "what is desired does not fit to the job's state"


def numbers_by_job(transaction: Transaction, table: type[EventRow] | type[LogLineRow]) -> dict[str, list[int]]:
    """List the numbers of a table's rows in order, by job."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for job_id, number in run(connection_of(transaction), f"SELECT job_id, seq FROM {table.__tablename__} ORDER BY seq"):
        numbers[job_id].append(number)
    return numbers


def _is_alive(world: World, attempt: Row[Any]) -> bool:
    """True if the attempt has processes, and its lease is not over, so that they have not stopped themselves."""
    lease_is_over = attempt.lease_expires_at is not None and attempt.lease_expires_at < world.clock.now()
    return world.launcher.is_running(AttemptRef(attempt_id=attempt.id, epoch=attempt.epoch)) and not lease_is_over
