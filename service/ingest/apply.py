"""Apply batches of reports: those that arrive together in one transaction, and each as if it were alone.

What every batch changes (when the attempt was heard, its lease, its sequence number, the curve) is
written for all attempts together, with a few statements. Reports of other kinds change the rows of
their attempt and job one by one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from operator import lt
from typing import Any

from sqlalchemy.orm import Session

from octet.api_schemas import AttemptState, DesiredState, FailureReason
from octet.api_schemas import report as contracts
from octet.api_schemas.export import EXPORT_PROGRESS
from octet.api_schemas.training import KeepSpec
from octet.service import store
from octet.service.db.bulk import Transaction, connection_of
from octet.service.db.tables import AttemptRow, CheckpointRow, ExportRow, JobRow
from octet.service.errors import ServiceError
from octet.service.ingest import batches
from octet.service.ingest.batches import Report, SentBatch
from octet.service.ingest.decide import ENDINGS, Accepted, decide
from octet.service.jobs import attempts
from octet.service.jobs.attempts import START_PHASES, Ending
from octet.service.jobs.views import speed
from octet.service.store.curves import Point, pack_curve
from octet.service.store.ids import new_id
from octet.service.store.reporting import AttemptStatus, ReportRows

MAX_LOG_LINES, MAX_EVENTS = 100_000, 10_000

Clock = Callable[[datetime | None], datetime]
"""Returns the time that leases are measured by, given the time of PostgreSQL's clock that a statement has read."""


@dataclass
class Applied:
    """The effect of a batch. `phase_s` holds the duration in seconds of each phase of the start that it reported."""

    desired: DesiredState
    lease_s: float
    acknowledged_seq: int
    finished: bool = False
    queue_wait_s: float | None = None
    phase_s: dict[str, float] = field(default_factory=dict)


@dataclass
class _Work:
    """An accepted batch, divided: what comes before its steps, its steps, and the rest in the order of the reports.

    `opening` are the reports up to the one that starts the training, if the batch has it.
    """

    status: AttemptStatus
    rank: int
    new: Sequence[Report]
    applied: Applied
    opening: list[Report] = field(default_factory=list)
    steps: list[tuple[datetime, batches.StepReport]] = field(default_factory=list)
    rest: list[Report] = field(default_factory=list)

    def __post_init__(self) -> None:
        kinds = [type(report.body) for report in self.new]
        begin = kinds.index(contracts.StartedReport) + 1 if contracts.StartedReport in kinds else 0
        self.opening = list(self.new[:begin])
        for report in self.new[begin:]:
            if isinstance(report.body, batches.StepReport):
                self.steps.append((report.at, report.body))
            else:
                self.rest.append(report)

    @property
    def is_first(self) -> bool:
        """True if the attempt was not heard before this batch."""
        return not self.status.has_reported or self.status.state is AttemptState.LAUNCHING


def apply_all(
    transaction: Transaction, sent: Sequence[SentBatch], lease_s: float, clock: Clock
) -> "list[Applied | ServiceError]":
    """Apply batches in their order, and renew the leases of their attempts. A refused batch changes nothing.

    Returns what each did, or why it was refused.
    """
    # Two processes that lock the same jobs lock them in this order.
    store.reporting.lock_jobs(transaction, sorted({one.attempt_id for one in sent}))
    answers: dict[int, Applied | ServiceError] = {}
    for turn in _turns(sent):
        statuses = _statuses(transaction, [sent[number] for number in turn])
        works: list[_Work] = []
        for number, status in zip(turn, statuses, strict=True):
            try:
                decision = decide(status, sent[number])
            except ServiceError as refusal:
                answers[number] = refusal
                continue
            assert status is not None, "a batch of an attempt that is not there is refused"
            answers[number] = applied = Applied(status.desired, lease_s, status.last_seq)
            if isinstance(decision, Accepted):
                works.append(_Work(status, sent[number].batch.rank, decision.new, applied))
        if works:
            _Turn(transaction, works, clock(works[0].status.read_at), lease_s).apply()
    return [answers[number] for number in range(len(sent))]


def _turns(sent: Sequence[SentBatch]) -> list[list[int]]:
    """Divide batches, by their numbers, so that a turn has one of each attempt: the next is judged by what it changed."""
    turns: list[list[int]] = []
    num_before: dict[str, int] = {}
    for number, one in enumerate(sent):
        turn = num_before[one.attempt_id] = num_before.get(one.attempt_id, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(number)
    return turns


def _statuses(transaction: Transaction, sent: Sequence[SentBatch]) -> list[AttemptStatus | None]:
    by_rank: dict[int, list[str]] = {}
    for one in sent:
        by_rank.setdefault(one.batch.rank, []).append(one.attempt_id)
    found = {rank: store.reporting.statuses(transaction, ids, rank) for rank, ids in by_rank.items()}
    return [found[one.batch.rank].get(one.attempt_id) for one in sent]


@dataclass
class _Turn:
    """Accepted batches of different attempts while they are applied."""

    transaction: Transaction
    works: Sequence[_Work]
    now: datetime
    lease_s: float

    def apply(self) -> None:
        self._open()
        self._write_together()
        self._close()

    def _open(self) -> None:
        """Write what the steps of a batch build on: the attempt is on the cluster, and trains."""
        opened = [work for work in self.works if work.is_first or work.opening]
        if opened:
            with self._rows(opened) as (session, rows):
                for work in opened:
                    job, attempt = rows[work.status.attempt_id]
                    attempts.heard(session, job, attempt, self.now)
                    if attempt.last_report_at is None:
                        work.applied.queue_wait_s = (attempt.created_at - job.queued_at).total_seconds()
                    _Reports(session, job, attempt, work, self.now).apply(work.opening)
                    work.status = work.status._replace(num_steps=job.num_steps)

    def _write_together(self) -> None:
        """Write what all batches change, with statements about all of them."""
        until = self.now + timedelta(seconds=self.lease_s)
        rows, renewed, heard = ReportRows(), list[str](), list[str]()
        for work in self.works:
            status = work.status
            if work.steps:
                self._add_steps(work, rows, until)
            else:
                (heard if work.rank else renewed).append(status.attempt_id)
            if work.new:
                work.applied.acknowledged_seq = work.new[-1].seq
                rows.sequences.append((status.attempt_id, work.rank, work.new[-1].seq))
        store.reporting.hear(self.transaction, heard, self.now)
        store.reporting.renew_leases(self.transaction, renewed, self.now, until)
        store.reporting.write(self.transaction, rows)

    def _add_steps(self, work: _Work, rows: ReportRows, until: datetime) -> None:
        status, bodies = work.status, [step for _, step in work.steps]
        numbers, last = [body.step for body in bodies], bodies[-1]
        # In the order of the columns of `store.reporting`.
        rows.attempts.append((status.attempt_id, last.step, self.now, self.now, until))
        rows.jobs.append((status.job_id, *progress(last, status.num_steps), self.now))
        moments = [at for at, _ in work.steps]
        if not work.opening and numbers[0] > status.last_step and all(map(lt, numbers, numbers[1:])):
            rows.parts.append(pack_curve(status.job_id, status.attempt_id, moments, bodies))
            return
        points = [_point(status.attempt_id, at, body) for at, body in zip(moments, bodies, strict=True)]
        with Session(connection_of(self.transaction)) as session:
            store.curves.put_points(session, status.job_id, points)

    def _close(self) -> None:
        """Write the reports of other kinds, which may end the attempt."""
        closed = [work for work in self.works if work.rest]
        if closed:
            with self._rows(closed) as (session, rows):
                for work in closed:
                    _Reports(session, *rows[work.status.attempt_id], work, self.now).apply(work.rest)

    @contextmanager
    def _rows(self, works: Sequence[_Work]) -> Iterator[tuple[Session, dict[str, tuple[JobRow, AttemptRow]]]]:
        with Session(connection_of(self.transaction)) as session:
            yield session, store.jobs.attempts_with_jobs(session, [work.status.attempt_id for work in works])
            session.flush()


@dataclass
class _Reports:
    """The reports of one batch that change the rows of their attempt and job. Log lines are gathered."""

    session: Session
    job: JobRow
    attempt: AttemptRow
    work: _Work
    now: datetime
    log_lines: list[dict[str, Any]] = field(default_factory=list)

    def apply(self, reports: Sequence[Report]) -> None:
        for report in reports:
            self._apply_one(report)
        store.records.add_log_lines(self.session, self.log_lines)

    def _apply_one(self, report: Report) -> None:
        match report.body:
            case contracts.ExporterReport() as body:
                store.records.put_exporter(self.session, self.attempt.id, self.work.rank, body.address)
            case contracts.PhaseReport() as body:
                self._phase(body, report.at)
            case contracts.StartedReport() as body:
                self._started(body)
            case contracts.EvaluationReport() as body:
                self._evaluation(body)
            case contracts.CheckpointReport() as body:
                self._checkpoint(body, report.at)
            case contracts.ExportReport() as body:
                self._export(body, report.at)
            case contracts.MeasuredReport() as body:
                measured = body.model_dump(mode="json")
                store.records.put_measured(
                    self.session, self.job.id, self.now, body.step, measured["memory"], measured["layers"]
                )
            case contracts.LogReport() as body:
                self._log(body, report.at)
            case contracts.EventReport() as body:
                if body.type == EXPORT_PROGRESS:
                    self.attempt.last_progress_at = self.now
                self._event(body.type, body.message, **body.data)
            case contracts.FinishedReport() as body:
                self._finished(body)

    def _phase(self, body: contracts.PhaseReport, at: datetime) -> None:
        earlier = [getattr(self.attempt, f"{phase}_at") for phase in START_PHASES[: START_PHASES.index(body.phase)]]
        since = max([moment for moment in earlier if moment is not None], default=self.attempt.created_at)
        # By the rank's clock, which may be anywhere; it took no longer than has passed by ours.
        passed_s = max(0.0, (self.now - self.attempt.created_at).total_seconds())
        self.work.applied.phase_s[body.phase] = min(max(0.0, (at - since).total_seconds()), passed_s)
        setattr(self.attempt, f"{body.phase}_at", at)

    def _started(self, body: contracts.StartedReport) -> None:
        self.attempt.node, self.attempt.device = body.node, body.device
        self.attempt.last_progress_at = self.now
        counts = {name: getattr(body, name) for name in store.records.COUNTS}
        attempts.started(self.session, self.job, self.attempt, self.now, body.resumed_from_step, dict(counts))
        store.records.drop_after(self.session, self.job.id, body.resumed_from_step)
        store.records.put_size(self.session, self.job.id, self.attempt.id, self.now, body.resumed_from_step, counts)
        # Also where the spec says it: to read it there for each batch of steps takes as long as the rest of the query.
        self.job.steps = body.steps or self.job.spec["training"]["steps"]
        self.job.step, self.job.loss = body.resumed_from_step, store.curves.last_loss(self.session, self.job.id)
        self.job.best_evaluation_loss = store.curves.best_evaluation_loss(self.session, self.job.id)
        self.job.tokens_per_s = self.job.remaining_s = None
        self.job.reported_at = self.now

    def _evaluation(self, body: contracts.EvaluationReport) -> None:
        self.attempt.last_progress_at = self.now
        if store.curves.put_evaluation(self.session, self.job.id, body.step, body.loss, body.metrics):
            self.job.best_evaluation_loss = store.curves.best_evaluation_loss(self.session, self.job.id)
        else:
            self._event("evaluation.without_step", f"step {body.step} was evaluated and is not in the curve", loss=body.loss)

    def _checkpoint(self, body: contracts.CheckpointReport, at: datetime) -> None:
        row = CheckpointRow(
            id=new_id("ckpt", self.now),
            job_id=self.job.id,
            attempt_id=self.attempt.id,
            created_at=at,
            step=body.step,
            name=body.name,
            num_bytes=body.num_bytes,
            sha256=body.sha256,
            loss=body.loss,
        )
        store.records.put_checkpoint(self.session, row)
        self.attempt.last_progress_at = self.now
        message = f"checkpoint of step {body.step} is complete"
        keep = self.job.spec["training"].get("keep")
        if keep is not None:  # a job from before the field keeps all
            removed = store.records.remove_surplus(self.session, self.job.id, KeepSpec.read_stored(keep))
            message += f"; removed: {', '.join(map(str, removed))}" if removed else ""
        self._event("checkpoint.saved", message, step=body.step, num_bytes=body.num_bytes)

    def _export(self, body: contracts.ExportReport, at: datetime) -> None:
        fields = body.model_dump(mode="json", exclude={"kind"})
        row = ExportRow(id=new_id("exp", self.now), job_id=self.job.id, attempt_id=self.attempt.id, created_at=at, **fields)
        self.attempt.last_progress_at = self.now
        if not store.records.put_export(self.session, row):  # an attempt has found it, and reports it again
            return
        data: dict[str, Any] = {"step": body.step, "name": body.name, "num_bytes": body.num_bytes}
        message = f"the checkpoint of step {body.step} is exported as {body.name}"
        if body.address is not None:
            data["address"] = body.address
            message += f", and in {body.address}"
        if body.mismatch is not None:
            compared = body.mismatch.evaluation
            data |= compared.model_dump()
            message += f"; KL divergence from the trainer's evaluation: {compared.kl_divergence:.3g} nats per token"
        self._event("job.exported", message, **data)

    def _log(self, body: contracts.LogReport, at: datetime) -> None:
        self.attempt.num_log_lines += 1
        if self.attempt.num_log_lines > MAX_LOG_LINES:
            if self.attempt.num_log_lines == MAX_LOG_LINES + 1:
                self._event("log.truncated", f"attempt {self.attempt.epoch} has {MAX_LOG_LINES} log lines; more are dropped")
            return
        self.job.last_log_seq += 1
        line = {"job_id": self.job.id, "seq": self.job.last_log_seq, "attempt_id": self.attempt.id, "rank": self.work.rank}
        self.log_lines.append(line | {"at": at, "level": body.level, "message": body.message})

    def _finished(self, body: contracts.FinishedReport) -> None:
        reason = (body.reason or FailureReason.WORKER_ERROR) if body.outcome == "failed" else None
        # Ranks that make way were asked to pause, and say so.
        is_yielding = self.job.desired is DesiredState.YIELD and body.outcome == "cancelled"
        message = "it made way" if is_yielding else body.message
        ending = Ending(ENDINGS[body.outcome], reason, message, body.summary)
        attempts.finish(self.session, self.job, self.attempt, ending, self.now)
        self.work.applied.finished = True

    def _event(self, type_: str, message: str, **data: Any) -> None:
        """Add an event in the words of the rank that reports."""
        self.attempt.num_events += 1
        if self.attempt.num_events > MAX_EVENTS + 1:
            return
        if self.attempt.num_events > MAX_EVENTS:
            type_, data = "events.truncated", {}
            message = f"the ranks of attempt {self.attempt.epoch} have sent {MAX_EVENTS} events; more are dropped"
        event = store.jobs.add_event(self.session, self.job, self.now, type_, message, attempt_id=self.attempt.id, data=data)
        event.actor = f"rank {self.work.rank}"


def progress(step: batches.StepReport, num_steps: int | None) -> tuple[int, float | None, float | None, float | None]:
    """Return step, loss, tokens_per_s and remaining_s of a job after a step. num_steps: its last step, if it is known."""
    remaining_s = None if num_steps is None else max(0, num_steps - step.step) * step.step_time_s
    is_finite = remaining_s is not None and math.isfinite(remaining_s)
    return step.step, step.loss, speed(step.tokens, step.step_time_s), remaining_s if is_finite else None


def _point(attempt_id: str, at: datetime, step: batches.StepReport) -> Point:
    return Point(
        step=step.step,
        at=at,
        attempt_id=attempt_id,
        loss=step.loss,
        gradient_norm=step.gradient_norm,
        learning_rate=step.learning_rate,
        tokens=step.tokens,
        step_time_s=step.step_time_s,
        data_wait_s=step.data_wait_s,
    )
