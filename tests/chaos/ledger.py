"""The ledger compares the database after a storm with the API's answers to customers. No list may have findings."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from octet.api_schemas import Blame, JobState
from octet.api_schemas.job import RetrySpec
from octet.service import store
from octet.service.db.tables import AttemptRow, EventRow, JobRow, LogLineRow
from octet.service.jobs import retries
from octet.service.store.curves import Point

Curve = list[tuple[int, float | None, float | None]]
"""Step, training loss and evaluation loss, in the order of steps."""
_MOST_STEPS = 100_000


@dataclass
class Findings:
    """Problems by kind. Each entry names its job."""

    lost: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    overlapping_attempts: list[str] = field(default_factory=list)
    steps_counted_twice: list[str] = field(default_factory=list)
    steps_missing: list[str] = field(default_factory=list)
    gaps_in_events: list[str] = field(default_factory=list)
    gaps_in_logs: list[str] = field(default_factory=list)
    curves_that_differ: list[str] = field(default_factory=list)
    unexplained_failures: list[str] = field(default_factory=list)

    def by_kind(self) -> dict[str, list[str]]:
        return {kind.replace("_", " "): found for kind, found in vars(self).items()}

    def wrong(self) -> dict[str, list[str]]:
        """The kinds that have findings."""
        return {kind: found for kind, found in self.by_kind().items() if found}


def audit(
    session: Session, accepted: Mapping[str, str], expected: Mapping[int, Curve], lease_grace: timedelta = timedelta(0)
) -> Findings:
    """Check every job of a database after its customers have seen it end.

    accepted: the id that the API gave for each idempotency key; a job's name is its key. expected: the curve of an
    undisturbed job, by its number of ranks. lease_grace: after a lease, until its attempt counts as gone.
    """
    findings = Findings()
    jobs = {job.id: job for job in session.scalars(select(JobRow))}
    attempts = _by_job(session.scalars(select(AttemptRow).order_by(AttemptRow.epoch)))
    curves = {job_id: store.curves.points_after(session, job_id, 0, _MOST_STEPS) for job_id in jobs}
    events = _by_job(session.scalars(select(EventRow).order_by(EventRow.seq)))
    lines = _by_job(session.scalars(select(LogLineRow).order_by(LogLineRow.seq)))
    findings.lost += [f"{key}: {job_id}" for key, job_id in accepted.items() if job_id not in jobs]
    names = Counter(job.name for job in jobs.values())
    findings.doubled += [f"{name}: {count} jobs" for name, count in names.items() if count > 1]
    for job in jobs.values():
        if not _is_numbered(events[job.id], job.last_event_seq):
            findings.gaps_in_events.append(job.id)
        if not _is_numbered(lines[job.id], job.last_log_seq):
            findings.gaps_in_logs.append(job.id)
        findings.overlapping_attempts += [f"{job.id}: {words}" for words in _overlaps(job, attempts[job.id], lease_grace)]
        findings.steps_counted_twice += [f"{job.id}: {words}" for words in _counted_twice(attempts[job.id], curves[job.id])]
        _check_end(findings, job, attempts[job.id], curves[job.id], expected)
    return findings


def _check_end(
    findings: Findings, job: JobRow, attempts: list[AttemptRow], metrics: list[Point], expected: Mapping[int, Curve]
) -> None:
    if not job.state.is_terminal:
        findings.stuck.append(f"{job.id}: {job.state.value}")
    findings.stuck += [f"{job.id}: attempt {one.epoch} holds its slots" for one in attempts if one.released_at is None]
    if job.state is JobState.FAILED and not _is_used_up(job):
        findings.unexplained_failures.append(f"{job.id}: {job.reason} after the failures {job.failures}: {job.message}")
    if job.state is not JobState.SUCCEEDED:
        return
    if [point.step for point in metrics] != list(range(1, (job.num_steps or 0) + 1)):
        findings.steps_missing.append(job.id)
    if [(point.step, point.loss, point.evaluation_loss) for point in metrics] != expected[job.workers]:
        findings.curves_that_differ.append(job.id)


def _is_used_up(job: JobRow) -> bool:
    """Return True for a job that failed as often as a fault of the platform is tried again. A storm has no other faults."""
    if job.reason is None or job.reason.blame is not Blame.PLATFORM:
        return False
    retry = RetrySpec.read_stored(job.spec.get("retry", {}))
    budget = retries.budget_of(job.reason, retry)
    return budget is not None and retries.used_of(job.reason, retry, retries.counts_of(job.failures)) > budget


def _overlaps(job: JobRow, attempts: list[AttemptRow], lease_grace: timedelta) -> Iterator[str]:
    """Find attempts that were placed before the former one's processes were known to be gone, or had no lease any more."""
    if [attempt.epoch for attempt in attempts] != list(range(1, job.num_attempts + 1)):
        yield f"epochs {[attempt.epoch for attempt in attempts]} of {job.num_attempts} attempts"
    for before, after in pairwise(attempts):
        lease_ends = None if before.lease_expires_at is None else before.lease_expires_at + lease_grace
        is_gone = before.released_at is not None and before.released_at <= after.created_at
        is_fenced = lease_ends is not None and lease_ends < after.created_at
        if before.finished_at is None or before.finished_at > after.created_at or not (is_gone or is_fenced):
            yield (
                f"attempt {before.epoch} ({before.state.value}, {before.reason}) ended at {before.finished_at}, was released "
                f"at {before.released_at} and had a lease and its grace until {lease_ends}; attempt {after.epoch} was "
                f"placed at {after.created_at}"
            )


def _counted_twice(attempts: list[AttemptRow], metrics: list[Point]) -> Iterator[str]:
    """Find points of an attempt that lie before its start, or after the step that a later attempt resumed from."""
    starts = {attempt.id: attempt.resumed_from_step for attempt in attempts}
    following: int | None = None
    ends: dict[str, int | None] = {}
    for attempt in reversed(attempts):
        ends[attempt.id] = following
        if attempt.resumed_from_step is not None:
            following = attempt.resumed_from_step if following is None else min(following, attempt.resumed_from_step)
    for point in metrics:
        start, end = starts.get(point.attempt_id), ends.get(point.attempt_id)
        if start is None or point.step <= start or (end is not None and point.step > end):
            yield f"step {point.step} of {point.attempt_id}, which ran from {start} and was resumed at {end}"


def _is_numbered(rows: list[Any], last: int) -> bool:
    return [row.seq for row in rows] == list(range(1, last + 1))


def _by_job(rows: Iterable[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        found[row.job_id].append(row)
    return found
