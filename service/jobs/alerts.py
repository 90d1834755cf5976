"""Find the alerts that fire, from the database alone.

A rule here is one of `deploy/prometheus/rules/octet.yml`, and a test compares the two. Prometheus waits for `for` until a
condition fires; the service keeps no memory, so here what is wrong has lasted for the threshold and that time together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from octet.api_schemas.catalog import Alert, AlertName, Severity
from octet.service import store
from octet.service.store.alerts import LateJob

WAITED_S = 1800
SILENT_S = 30
UNSAVED_S, UNSAVED_INTERVALS = 300, 3
MANY_LOST, LOST_WITHIN_S = 3, 600


class Rule(NamedTuple):
    """Severity of an alert, and how long its condition holds before it fires."""

    severity: Severity
    for_s: int

    @property
    def lasted(self) -> timedelta:
        return timedelta(seconds=self.for_s)


RULES: dict[AlertName, Rule] = {
    "OctetNoLeader": Rule("critical", 60),
    "OctetLoopStalled": Rule("critical", 30),
    "OctetLeaseStorm": Rule("critical", 30),
    "OctetJobStuckInQueue": Rule("warning", 300),
    "OctetJobNoHeartbeat": Rule("warning", 15),
    "OctetCheckpointTooOld": Rule("warning", 60),
}


@dataclass(frozen=True)
class Watch:
    """One look at the database: for whom (tenant None: all), which pools, how many alerts at most, where runbooks are."""

    session: Session
    now: datetime
    tenant: str | None
    pools: Sequence[str]
    limit: int
    runbooks: str

    def alerts(self) -> list[Alert]:
        """List what fires, critical alerts first. Those of leader, loops and leases are for every tenant."""
        return [alert for find in _FOUND_BY for alert in islice(find(self), self.limit)]

    def before(self, name: AlertName, threshold_s: float = 0) -> datetime:
        """Return the moment since which a condition must have lasted to fire."""
        return self.now - RULES[name].lasted - timedelta(seconds=threshold_s)

    def alert(self, name: AlertName, summary: str, *, since: datetime | None = None, loop: str | None = None) -> Alert:
        """Build an alert about the service, or one of its loops."""
        severity, runbook = RULES[name].severity, f"{self.runbooks}#{name.lower()}"
        return Alert(name=name, severity=severity, since=since, loop=loop, summary=summary, runbook=runbook)

    def about(self, name: AlertName, job: LateJob, summary: str) -> Alert:
        """Build an alert about a job."""
        named = {"job_id": job.id, "job_name": job.name, "pool": job.pool}
        return self.alert(name, summary, since=job.since).model_copy(update=named)


def checkpoint_interval_s(training: Mapping[str, Any], step_time_s: float) -> float | None:
    """Return the expected time between the checkpoints of a job at the speed of its last step; None if it takes none."""
    intervals_s = training["checkpoint_every"] * step_time_s, training.get("checkpoint_every_minutes", 0) * 60
    return min(filter(None, intervals_s), default=None)


def _no_leader(watch: Watch) -> Iterator[Alert]:
    until = store.queue.lease_until(watch.session, store.queue.LEADER)
    if until is None or until <= watch.before("OctetNoLeader"):
        yield watch.alert("OctetNoLeader", "No dispatcher leads: jobs are taken and none is started", since=until)


def _loops(watch: Watch) -> Iterator[Alert]:
    for loop, until in store.queue.loops_until(watch.session).items():
        if until <= watch.before("OctetLoopStalled"):
            summary = f"The dispatcher's loop {loop} makes no progress: jobs are taken and may wait"
            yield watch.alert("OctetLoopStalled", summary, since=until, loop=loop)


def _leases(watch: Watch) -> Iterator[Alert]:
    until = watch.before("OctetLeaseStorm")
    lost = store.alerts.count_lost(watch.session, watch.now - timedelta(seconds=LOST_WITHIN_S), until)
    _, overdue = store.queue.count_leases(watch.session, until)
    if max(lost, overdue) >= MANY_LOST:
        minutes = LOST_WITHIN_S // 60
        words = f"in {minutes} minutes" if lost >= MANY_LOST else "and have not ended yet"
        summary = f"{lost if lost >= MANY_LOST else overdue} attempts lost touch with the control plane {words}"
        yield watch.alert("OctetLeaseStorm", summary)


def _stuck(watch: Watch) -> Iterator[Alert]:
    before = watch.before("OctetJobStuckInQueue", WAITED_S)
    for job in store.alerts.queued_before(watch.session, watch.pools, before, watch.tenant):
        summary = f"Job {job.name} of pool {job.pool} has waited for more than {WAITED_S // 60} minutes"
        yield watch.about("OctetJobStuckInQueue", job, summary)


def _silent(watch: Watch) -> Iterator[Alert]:
    before = watch.before("OctetJobNoHeartbeat", SILENT_S)
    for job in store.alerts.silent_since(watch.session, before, watch.tenant, watch.limit):
        yield watch.about("OctetJobNoHeartbeat", job, f"Job {job.name} has not reported for more than {SILENT_S} s")


def _unsaved(watch: Watch) -> Iterator[Alert]:
    before = watch.before("OctetCheckpointTooOld", UNSAVED_S)
    found = store.alerts.saved_before(watch.session, before, watch.tenant)
    points = store.curves.current_points(watch.session, [job.id for job, _ in found])
    for job, training in found:
        interval_s = checkpoint_interval_s(training, points[job.id].step_time_s) if job.id in points else None
        if interval_s is not None and job.since < before - timedelta(seconds=UNSAVED_INTERVALS * interval_s):
            summary = f"Job {job.name} has saved no checkpoint for {UNSAVED_INTERVALS} intervals and {UNSAVED_S // 60} minutes"
            yield watch.about("OctetCheckpointTooOld", job, summary)


_FOUND_BY: tuple[Callable[[Watch], Iterator[Alert]], ...] = (_no_leader, _loops, _leases, _stuck, _silent, _unsaved)
"""In the order of severity."""
