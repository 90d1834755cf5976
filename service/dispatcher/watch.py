"""Watches live attempts: asks the cluster about their processes, checks their deadlines, ends those that cannot go on.

`judge` decides, and is pure. It runs twice: on rows that were read, to see if there is something to write, and again in
the transaction that writes, with the row locked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from octet.api_schemas import AttemptRef, AttemptState, DesiredState, FailureReason, Probe, ProbeState
from octet.service import store
from octet.service.db.tables import AttemptRow, JobRow
from octet.service.dispatcher.context import DispatcherContext
from octet.service.jobs import attempts
from octet.service.jobs.attempts import Ending
from octet.service.jobs.lifecycle import AttemptEvent
from octet.service.settings import Settings

AT_ONCE = 64
"""Attempts that are probed, and then judged in one read. One that does not answer in time holds up no earlier group."""
EXIT_GRACE = timedelta(seconds=3)
"""The last report of an ended process may arrive this much later. It has had that time already if nobody reported meanwhile."""

_ON_CLUSTER = {AttemptState.STARTING, AttemptState.RUNNING}


@dataclass(frozen=True)
class Finding:
    """The findings of `judge` about an attempt, to be written into its row."""

    exited_at: datetime | None
    placed_at: datetime | None
    ending: Ending | None


def step(context: DispatcherContext) -> None:
    with context.database.read() as session:
        live = store.queue.live_attempts(session)
    for first in range(0, len(live), AT_ONCE):
        together = live[first : first + AT_ONCE]
        probes: dict[AttemptRef, Probe] = {}
        context.each(partial(_probe, context, probes), [ref for ref, state in together if state in _ON_CLUSTER])
        context.each(partial(_write, context, probes), _with_news(context, [ref for ref, _ in together], probes))


def _probe(context: DispatcherContext, probes: dict[AttemptRef, Probe], ref: AttemptRef) -> None:
    probes[ref] = context.launcher.probe(ref)


def _with_news(context: DispatcherContext, refs: list[AttemptRef], probes: Mapping[AttemptRef, Probe]) -> list[AttemptRef]:
    """Return the attempts about which there is something to write. Nearly always there are none."""
    by_id = {ref.attempt_id: ref for ref in refs}
    with context.database.read() as session:
        now = context.database.now(session)
        return [
            by_id[attempt.id]
            for attempt, job in store.queue.attempts_to_judge(session, list(by_id))
            if _has_news(context, job, attempt, probes.get(by_id[attempt.id]), now)
        ]


def _write(context: DispatcherContext, probes: Mapping[AttemptRef, Probe], ref: AttemptRef) -> None:
    with context.write() as (session, now):
        locked = store.jobs.lock_attempt(session, ref.attempt_id)
        if locked is None or locked[1].state.is_terminal:  # the user may even have deleted it since it was judged
            return
        job, attempt = locked
        finding = judge(job, attempt, probes.get(ref), now, context.leads_since or now, context.settings)
        attempt.exited_at, attempt.placed_at = finding.exited_at, finding.placed_at
        if finding.ending is not None:
            attempts.finish(session, job, attempt, finding.ending, now)
    if finding.ending is not None:
        context.wake()


def _has_news(context: DispatcherContext, job: JobRow, attempt: AttemptRow, probe: Probe | None, now: datetime) -> bool:
    if attempt.state.is_terminal:
        return False
    finding = judge(job, attempt, probe, now, context.leads_since or now, context.settings)
    return finding != Finding(attempt.exited_at, attempt.placed_at, None)


def judge(
    job: JobRow, attempt: AttemptRow, probe: Probe | None, now: datetime, leads_since: datetime, settings: Settings
) -> Finding:
    """Judge a live attempt. A leader enforces deadlines only `lease_grace_s` after `leads_since`: workers report first."""
    is_gone = probe is not None and probe.state in {ProbeState.EXITED, ProbeState.ABSENT}
    is_unknown = probe is None or probe.state is ProbeState.UNREACHABLE
    exited_at = attempt.exited_at if is_unknown else (attempt.exited_at or now) if is_gone else None
    placed_at = attempt.placed_at or (probe.placed_at if probe else None)
    ending = None
    if is_gone and exited_at is not None and now >= min(exited_at, _heard_at(attempt, exited_at, leads_since)) + EXIT_GRACE:
        ending = _gone(job, probe)
    elif job.desired is not DesiredState.RUN:
        ending = _stopped(job, attempt, now, settings)
    if ending is None and now >= leads_since + timedelta(seconds=settings.lease_grace_s):
        ending = _overdue(attempt, now, leads_since, settings)
    return Finding(exited_at, placed_at, ending)


def _heard_at(attempt: AttemptRow, exited_at: datetime, leads_since: datetime) -> datetime:
    """When a rank reported last. While no dispatcher led, perhaps no server listened either."""
    return max(attempt.last_report_at or exited_at, leads_since)


def _gone(job: JobRow, probe: Probe | None) -> Ending:
    assert probe is not None
    if job.desired in {DesiredState.CANCEL, DesiredState.CANCEL_NOW}:
        return Ending(AttemptEvent.CANCEL, message="its processes have ended")
    if probe.state is ProbeState.ABSENT:
        return Ending(AttemptEvent.FAIL, FailureReason.CLUSTER_LOST, "the cluster no longer knows the attempt")
    message = probe.message or "its processes ended without a last report"
    return Ending(AttemptEvent.FAIL, probe.reason or FailureReason.WORKER_LOST, message)


def _stopped(job: JobRow, attempt: AttemptRow, now: datetime, settings: Settings) -> Ending | None:
    """End an attempt that has to stop and was never heard, or takes too long. To save a checkpoint takes longer."""
    if attempt.last_report_at is None:
        return Ending(AttemptEvent.CANCEL, message="stopped before its workers were heard")
    assert job.stop_requested_at is not None
    grace_s = settings.save_grace_s if job.desired.saves else settings.cancel_grace_s
    if now >= job.stop_requested_at + timedelta(seconds=grace_s):
        return Ending(AttemptEvent.CANCEL, message=f"did not stop within {grace_s:g} s and is ended")
    return None


def _overdue(attempt: AttemptRow, now: datetime, leads_since: datetime, settings: Settings) -> Ending | None:
    def is_over(since: datetime | None, limit_s: float) -> bool:
        """Count only time in which there was a leader: a clock that is set forward ends the lease of its leader too."""
        return since is not None and now >= max(since, leads_since) + timedelta(seconds=limit_s)

    reason, message = None, ""
    lease_ends = attempt.lease_expires_at
    if lease_ends is not None and now >= lease_ends + timedelta(seconds=settings.lease_grace_s):
        reason = FailureReason.LEASE_EXPIRED
        message = f"was not heard for {settings.lease_s + settings.lease_grace_s:g} s"
    elif attempt.state in {AttemptState.RESERVED, AttemptState.LAUNCHING}:
        if is_over(attempt.created_at, settings.launch_timeout_s):
            reason, message = FailureReason.LAUNCH_FAILED, f"was not launched within {settings.launch_timeout_s:g} s"
    elif attempt.state is AttemptState.STARTING:
        if is_over(attempt.launched_at, settings.start_timeout_s):
            reason, message = FailureReason.START_TIMEOUT, f"did not start training within {settings.start_timeout_s:g} s"
    elif is_over(attempt.last_progress_at, settings.stall_timeout_s):
        reason, message = FailureReason.STALLED, f"made no progress for {settings.stall_timeout_s:g} s"
    return Ending(AttemptEvent.FAIL, reason, message) if reason else None
