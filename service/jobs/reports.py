"""Applies the reports of a rank: one batch in one transaction, so all of it counts or none.

A batch may come twice or overlap an earlier one; reports that were applied are skipped by their sequence number. A batch
from an attempt that is no longer the job's current one changes nothing and is refused, which tells the worker to end.
"""

import hashlib
import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from api_schemas import (
    AttemptState,
    CheckpointReport,
    DesiredState,
    EvaluationReport,
    EventReport,
    ExporterReport,
    FailureReason,
    FinishedReport,
    LogReport,
    PhaseReport,
    Report,
    ReportBatch,
    ReportReply,
    StartedReport,
    StepReport,
)
from service import store
from service.db.tables import AttemptRow, CheckpointRow, JobRow
from service.errors import InvalidRequest, SequenceGap, StaleAttempt, Unauthenticated
from service.jobs import attempts
from service.jobs.attempts import Ending
from service.jobs.lifecycle import AttemptEvent
from service.jobs.step_batches import SentStep
from service.jobs.views import speed
from service.store.curves import Point
from service.store.ids import new_id

MAX_LOG_LINES = 100_000
START_PHASES = ("placed", "process_up", "torch_imported", "model_built", "first_step", "warmed_up")
_FROM_ANY_RANK = (ExporterReport, LogReport, EventReport, FinishedReport)
_OF_TRAINING = (StepReport, EvaluationReport, CheckpointReport)
_ENDINGS = {"succeeded": AttemptEvent.SUCCEED, "failed": AttemptEvent.FAIL, "cancelled": AttemptEvent.CANCEL}


@dataclass
class Applied:
    """What a batch did. `phase_s` holds the duration in seconds of each phase of the start that it reported."""

    desired: DesiredState
    lease_s: float
    acknowledged_seq: int
    finished: bool = False
    queue_wait_s: float | None = None
    phase_s: dict[str, float] = field(default_factory=dict)

    @property
    def reply(self) -> ReportReply:
        """The answer to the rank."""
        return ReportReply(desired=self.desired, lease_s=self.lease_s, acknowledged_seq=self.acknowledged_seq)


def apply(session: Session, attempt_id: str, token: str, batch: ReportBatch, lease_s: float, now: datetime) -> Applied:
    """Apply the new reports of the batch and renew the lease.

    Raises Unauthenticated for a wrong token or an unknown attempt, StaleAttempt if the attempt is not the job's current
    one, SequenceGap if a report before this batch is missing, and InvalidRequest for reports that this rank cannot send in
    this state.
    """
    locked = store.jobs.lock_attempt(session, attempt_id)
    if locked is None:
        authenticate(None, token)
    assert locked is not None, "nobody has the token of an attempt that is not there"
    job, attempt = locked
    authenticate(attempt, token)
    if batch.rank >= attempt.workers:
        raise InvalidRequest(f"rank: got {batch.rank}; allowed: below {attempt.workers}, the attempt's workers")
    last_seq = store.records.last_sequence(session, attempt.id, batch.rank)
    is_echo = bool(batch.reports) and batch.reports[-1].seq <= last_seq
    if batch.epoch != attempt.epoch or (attempt.state.is_terminal and not is_echo):
        raise StaleAttempt(
            f"attempt {attempt_id} has epoch {attempt.epoch} and is {attempt.state.value}; got epoch {batch.epoch}. "
            "It no longer counts; end this process."
        )
    applied = Applied(job.desired, lease_s, last_seq)
    if attempt.state.is_terminal:
        return applied  # the rank sends its last batch again because it did not get the answer
    new = _unseen(batch.reports, last_seq)
    _heard(session, job, attempt, applied, now)
    if batch.rank == 0:
        attempt.lease_expires_at = now + timedelta(seconds=lease_s)
    _Batch(session, job, attempt, batch.rank, now, applied).apply(new)
    if new:
        store.records.set_last_sequence(session, attempt.id, batch.rank, new[-1].seq)
        applied.acknowledged_seq = new[-1].seq
    return applied


def authenticate(attempt: AttemptRow | None, token: str) -> None:
    """Raise Unauthenticated unless the token is the attempt's. An attempt that is not there gets the same answer."""
    if not is_token_of(attempt, token):
        raise Unauthenticated("the token is not this attempt's; end this process")


def is_token_of(attempt: AttemptRow | None, token: str) -> bool:
    """Return True if the token was made at the launch of this attempt. It takes as long for one that is not there."""
    return is_hash_of(attempt.token_hash if attempt is not None else None, token)


def is_hash_of(known: bytes | None, token: str) -> bool:
    """Return True if the hash is the token's."""
    given = hashlib.sha256(token.encode()).digest()
    return hmac.compare_digest(given, known or bytes(len(given))) and known is not None


def _unseen(reports: Sequence[Report], last_seq: int) -> list[Report]:
    new = [report for report in reports if report.seq > last_seq]
    for expected, report in enumerate(new, start=last_seq + 1):
        if report.seq != expected:
            raise SequenceGap(f"got report {report.seq}; expected {expected}. Send again from {expected}.")
    return new


def _heard(session: Session, job: JobRow, attempt: AttemptRow, applied: Applied, now: datetime) -> None:
    if attempt.state is AttemptState.LAUNCHING:
        attempts.launched(session, job, attempt, now)
    if attempt.last_report_at is None:
        applied.queue_wait_s = (attempt.created_at - job.queued_at).total_seconds()
    attempt.last_report_at = now


@dataclass
class _Batch:
    """One batch while it is applied. Steps and log lines are gathered, and written in one statement each."""

    session: Session
    job: JobRow
    attempt: AttemptRow
    rank: int
    now: datetime
    applied: Applied
    steps: dict[int, Point] = field(default_factory=dict)
    log_lines: list[dict[str, Any]] = field(default_factory=list)

    def apply(self, reports: Sequence[Report]) -> None:
        for report in reports:
            if self.attempt.state.is_terminal:
                raise InvalidRequest(f"reports: got report {report.seq} after 'finished'. Nothing follows it.")
            if self.rank != 0 and not isinstance(report.body, _FROM_ANY_RANK):
                raise InvalidRequest(f"reports: got a {report.body.kind!r} report of rank {self.rank}; rank 0 sends these")
            if isinstance(report.body, _OF_TRAINING) and self.attempt.state is not AttemptState.RUNNING:
                raise InvalidRequest(f"reports: got a {report.body.kind!r} report before 'started'")
            self._apply_one(report)
        self._write_gathered()

    def _apply_one(self, report: Report) -> None:
        match report.body:
            case ExporterReport() as body:
                store.records.put_exporter(self.session, self.attempt.id, self.rank, body.address)
            case PhaseReport() as body:
                self._phase(body, report.at)
            case StartedReport() as body:
                self._started(body)
            case StepReport() as body:
                self._step(body, report.at)
            case EvaluationReport() as body:
                self._evaluation(body)
            case CheckpointReport() as body:
                self._checkpoint(body, report.at)
            case LogReport() as body:
                self._log(body, report.at)
            case EventReport() as body:
                self._event(body.type, body.message, **body.data)
            case FinishedReport() as body:
                self._finished(body)

    def _phase(self, body: PhaseReport, at: datetime) -> None:
        name = f"{body.phase}_at"
        earlier = [getattr(self.attempt, f"{phase}_at") for phase in START_PHASES[: START_PHASES.index(body.phase)]]
        since = max([moment for moment in earlier if moment is not None], default=self.attempt.created_at)
        # By the rank's clock, which may be anywhere; it took no longer than has passed by ours.
        passed_s = max(0.0, (self.now - self.attempt.created_at).total_seconds())
        self.applied.phase_s[body.phase] = min(max(0.0, (at - since).total_seconds()), passed_s)
        setattr(self.attempt, name, at)

    def _started(self, body: StartedReport) -> None:
        self.attempt.node, self.attempt.device = body.node, body.device
        self.attempt.last_progress_at = self.now
        attempts.started(self.session, self.job, self.attempt, self.now, body.resumed_from_step)
        store.records.drop_after(self.session, self.job.id, body.resumed_from_step)
        # Also where the spec says it: to read it there for each batch of steps takes as long as the rest of the query.
        self.job.steps = body.steps or self.job.spec["training"]["steps"]
        self.job.step, self.job.loss = body.resumed_from_step, store.curves.last_loss(self.session, self.job.id)
        self.job.tokens_per_s = self.job.remaining_s = None
        self.job.reported_at = self.now

    def _step(self, body: StepReport, at: datetime) -> None:
        self.steps[body.step] = point(self.attempt.id, at, body)
        for name, value in progress(body, self.job.num_steps).items():
            setattr(self.job, name, value)
        self.job.reported_at = self.now
        self.attempt.last_step = body.step
        self.attempt.last_progress_at = self.now

    def _evaluation(self, body: EvaluationReport) -> None:
        self.attempt.last_progress_at = self.now
        if body.step in self.steps:
            self.steps[body.step] = self.steps[body.step]._replace(evaluation_loss=body.loss, evaluation_metrics=body.metrics)
        elif not store.curves.put_evaluation(self.session, self.job.id, body.step, body.loss, body.metrics):
            self._event("evaluation.without_step", f"step {body.step} was evaluated and is not in the curve", loss=body.loss)

    def _checkpoint(self, body: CheckpointReport, at: datetime) -> None:
        row = CheckpointRow(
            id=new_id("ckpt", self.now),
            job_id=self.job.id,
            attempt_id=self.attempt.id,
            created_at=at,
            **body.model_dump(exclude={"kind"}),
        )
        store.records.put_checkpoint(self.session, row)
        self.attempt.last_progress_at = self.now
        self._event("checkpoint.saved", f"checkpoint of step {body.step} is complete", step=body.step, num_bytes=body.num_bytes)

    def _log(self, body: LogReport, at: datetime) -> None:
        self.attempt.num_log_lines += 1
        if self.attempt.num_log_lines > MAX_LOG_LINES:
            if self.attempt.num_log_lines == MAX_LOG_LINES + 1:
                self._event("log.truncated", f"attempt {self.attempt.epoch} has {MAX_LOG_LINES} log lines; more are dropped")
            return
        self.job.last_log_seq += 1
        line = {"job_id": self.job.id, "seq": self.job.last_log_seq, "attempt_id": self.attempt.id, "rank": self.rank}
        self.log_lines.append(line | {"at": at, "level": body.level, "message": body.message})

    def _finished(self, body: FinishedReport) -> None:
        if self.rank != 0 and body.outcome != "failed":
            raise InvalidRequest(f"reports: rank {self.rank} reported {body.outcome!r}; only rank 0 can")
        if body.outcome == "cancelled" and self.job.desired is not DesiredState.CANCEL:
            raise InvalidRequest("reports: got outcome 'cancelled'; nobody asked for that")
        self._write_gathered()
        reason = (body.reason or FailureReason.WORKER_ERROR) if body.outcome == "failed" else None
        ending = Ending(_ENDINGS[body.outcome], reason, body.message, body.summary)
        attempts.finish(self.session, self.job, self.attempt, ending, self.now)
        self.applied.finished = True

    def _event(self, type_: str, message: str, **data: Any) -> None:
        store.jobs.add_event(self.session, self.job, self.now, type_, message, attempt_id=self.attempt.id, data=data)

    def _write_gathered(self) -> None:
        store.curves.put_points(self.session, self.job.id, self.steps.values())
        store.records.add_log_lines(self.session, self.log_lines)
        self.steps, self.log_lines = {}, []


def progress(step: StepReport | SentStep, num_steps: int | None) -> dict[str, Any]:
    """Say how far a job is after a step, in the words of its row. num_steps: the job's last step, if it is known."""
    remaining_s = None if num_steps is None else max(0, num_steps - step.step) * step.step_time_s
    return {
        "step": step.step,
        "loss": step.loss,
        "tokens_per_s": speed(step.tokens, step.step_time_s),
        "remaining_s": remaining_s if remaining_s is not None and math.isfinite(remaining_s) else None,
    }


def point(attempt_id: str, at: datetime, step: StepReport) -> Point:
    """Make the point of a step, before it is evaluated."""
    return Point(attempt_id=attempt_id, at=at, **step.model_dump(exclude={"kind"}))
