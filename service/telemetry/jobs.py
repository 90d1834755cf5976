"""Show to Prometheus the values that each job last reported. A job too short to be scraped itself is visible here.

Shown are at most `MAX_JOBS` jobs, live or just ended, with at most `MAX_SERIES` series each; the rest is left out and
counted. A job's name and its `comparison` label are the user's words, so only `octet_job_info` carries them.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.orm import Session

from octet.service import store
from octet.service.db.engine import Database
from octet.service.db.tables import AttemptRow, CheckpointRow, EvaluationRow, ExportRow, JobRow
from octet.service.jobs import views
from octet.service.jobs.alerts import checkpoint_interval_s
from octet.service.jobs.attempts import START_PHASES
from octet.service.store.curves import Point

MAX_JOBS = 200
MAX_SERIES = 108
"""A job has at most 44, and 64 for the scores of its tasks."""
ENDED_SHOWN_FOR = timedelta(minutes=15)
COMPARISON = "comparison"
_LONGEST_LABEL = 100

HELP = {
    "octet_job_info": "1; joins a job's id to its name and to the comparison that it is labelled with",
    "octet_job_state": "1 for the state that the job is in",
    "octet_job_steps": "optimizer steps that the job will take",
    "octet_job_step": "optimizer steps done",
    "octet_job_loss": "last training loss, nats per token",
    "octet_job_gradient_norm": "global L2 norm of the gradients before clipping, last step",
    "octet_job_learning_rate": "learning rate of the last step",
    "octet_job_tokens_per_second": "tokens per second over all ranks, last step",
    "octet_job_step_duration_seconds": "wall time of the last step",
    "octet_job_data_wait_seconds": "time in the last step that was spent waiting for data",
    "octet_job_evaluation_loss": "loss of the last evaluation, nats per target: a token or an image",
    "octet_job_evaluation_step": "step after which the last evaluation was made",
    "octet_job_evaluation_perplexity": "exp of the loss of the last evaluation",
    "octet_job_evaluation_metric": "what the model's family measures besides the loss, and scores of tasks, last evaluation",
    "octet_job_remaining_seconds": "expected time to the end at the speed of the last step",
    "octet_job_attempts": "attempts that were placed",
    "octet_job_failures": "attempts that failed",
    "octet_job_last_queue_wait_seconds": "from the queue to a slot, last attempt",
    "octet_job_start_seconds": "from the placement to each phase of the start, last attempt",
    "octet_job_last_report_timestamp_seconds": "when the job last reported, while it runs",
    "octet_job_started_timestamp_seconds": "when the job first began to train",
    "octet_job_last_checkpoint_timestamp_seconds": "when the last checkpoint was complete",
    "octet_job_last_checkpoint_step": "step of the last checkpoint",
    "octet_job_checkpoint_interval_seconds": "expected time between checkpoints at the speed of the last step",
    "octet_job_export_step": "step of the newest export",
    "octet_job_export_kl_divergence": "of the trainer's evaluation from the newest export as served, nats per token",
    "octet_job_export_top1_agreement": "share of tokens with the same largest logit, newest export",
    "octet_job_memory_bytes": "bytes on rank 0 by class, of a job that succeeded",
}
_OF_EACH_JOB = ("job_id", "tenant", "pool", "level")
_LABELS = {
    "octet_job_info": (COMPARISON, "name"),
    "octet_job_state": ("state",),
    "octet_job_start_seconds": ("phase",),
    "octet_job_memory_bytes": ("class",),
    "octet_job_evaluation_metric": ("metric",),
}


class Reported(NamedTuple):
    """A job with the last value of everything it reported."""

    job: JobRow
    attempt: AttemptRow | None
    metric: Point | None
    evaluation: EvaluationRow | None
    checkpoint: CheckpointRow | None
    export: ExportRow | None


Value = tuple[str, float | None, tuple[str, ...]]
Series = tuple[str, tuple[str, ...], float]
"""A family's name, the values of the labels, and the value."""


class JobSeries(Collector):
    """Reads the last values of jobs from the database at each scrape. Any thread may call it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._ended: dict[tuple[str, datetime], list[Series]] = {}

    def describe(self) -> Iterable[Metric]:
        return []  # otherwise registering would collect, and read the database

    def collect(self) -> Iterable[Metric]:
        """Return all families. A job has at most `MAX_SERIES` series."""
        with self._database.read() as session:
            since = self._database.now(session) - ENDED_SHOWN_FOR
            jobs = store.jobs.jobs_to_show(session, since, MAX_JOBS)
            num_hidden = store.jobs.count_jobs_to_show(session, since) - len(jobs)
            found = self._series(session, jobs)
        families = {
            name: GaugeMetricFamily(name, text, labels=(*_OF_EACH_JOB, *_LABELS.get(name, ()))) for name, text in HELP.items()
        }
        for series in found:
            for name, labels, value in series[:MAX_SERIES]:
                families[name].add_metric(labels, value)
        with self._lock:
            self._num_dropped += sum(len(series[MAX_SERIES:]) for series in found)
            num_dropped = self._num_dropped
        yield from families.values()
        dropped = "series left out of answers because of the budget"
        yield CounterMetricFamily("octet_exporter_dropped_series", dropped, value=num_dropped)
        yield GaugeMetricFamily("octet_jobs_hidden", "live or recent jobs without series of their own", value=num_hidden)

    def _series(self, session: Session, jobs: Sequence[tuple[str, datetime | None]]) -> list[list[Series]]:
        """Read the series of these jobs, in their order. Those of an ended job stay the same, so they are kept."""
        kept = self._ended
        found = {job_id: kept[job_id, at] for job_id, at in jobs if at is not None and (job_id, at) in kept}
        new = store.jobs.find_jobs(session, [job_id for job_id, _ in jobs if job_id not in found])
        found |= {reported.job.id: _series_of(reported) for reported in _reported(session, new)}
        self._ended = {(job_id, at): found[job_id] for job_id, at in jobs if at is not None}
        return [found[job_id] for job_id, _ in jobs]


def _series_of(reported: Reported) -> list[Series]:
    job = reported.job
    common = (job.id, job.tenant, job.pool, job.spec["precision"]["level"])
    return [(name, (*common, *labels), value) for name, value, labels in _values(reported) if value is not None]


def _reported(session: Session, jobs: Sequence[JobRow]) -> Iterator[Reported]:
    if not jobs:
        return
    attempts = store.jobs.current_attempts(session, jobs)
    ids = [job.id for job in jobs]
    metrics = store.curves.current_points(session, ids)
    evaluations = store.curves.last_evaluations(session, ids)
    checkpoints, exports = store.records.last_checkpoints(session, ids), store.records.last_exports(session, ids)
    for job in jobs:
        found = (attempts.get(job.id), metrics.get(job.id), evaluations.get(job.id), checkpoints.get(job.id))
        yield Reported(job, *found, exports.get(job.id))


def _values(reported: Reported) -> Iterator[Value]:
    job, attempt, metric, evaluation, checkpoint, export = reported
    yield "octet_job_info", 1.0, (job.spec["labels"].get(COMPARISON, "")[:_LONGEST_LABEL], job.name)
    yield "octet_job_state", 1.0, (job.state.value,)
    yield "octet_job_steps", job.num_steps, ()
    yield "octet_job_step", job.step, ()
    yield "octet_job_loss", job.loss, ()
    yield "octet_job_tokens_per_second", job.tokens_per_s, ()
    yield "octet_job_remaining_seconds", job.remaining_s if job.finished_at is None else None, ()
    yield "octet_job_attempts", job.num_attempts, ()
    yield "octet_job_failures", job.num_failures + job.num_platform_failures, ()
    yield "octet_job_started_timestamp_seconds", job.started_at.timestamp() if job.started_at else None, ()
    if metric is not None:
        yield "octet_job_gradient_norm", metric.gradient_norm, ()
        yield "octet_job_learning_rate", metric.learning_rate, ()
        yield "octet_job_step_duration_seconds", metric.step_time_s, ()
        yield "octet_job_data_wait_seconds", metric.data_wait_s, ()
        interval_s = checkpoint_interval_s(job.spec["training"], metric.step_time_s)
        yield "octet_job_checkpoint_interval_seconds", interval_s, ()
    if evaluation is not None:
        yield from _values_of_evaluation(evaluation)
    if checkpoint is not None:
        yield "octet_job_last_checkpoint_timestamp_seconds", checkpoint.created_at.timestamp(), ()
        yield "octet_job_last_checkpoint_step", checkpoint.step, ()
    if export is not None:
        yield "octet_job_export_step", export.step, ()
        mismatch = (export.mismatch or {}).get("evaluation", {})
        yield "octet_job_export_kl_divergence", mismatch.get("kl_divergence"), ()
        yield "octet_job_export_top1_agreement", mismatch.get("top1_agreement"), ()
    if attempt is not None:
        yield from _values_of_attempt(job, attempt)
    for kind, num_bytes in ((job.summary or {}).get("memory_bytes") or {}).items():
        yield "octet_job_memory_bytes", num_bytes, (kind,)


def _values_of_evaluation(evaluation: EvaluationRow) -> Iterator[Value]:
    yield "octet_job_evaluation_loss", evaluation.loss, ()
    yield "octet_job_evaluation_step", evaluation.step, ()
    yield "octet_job_evaluation_perplexity", views.perplexity(evaluation.loss), ()
    for name, value in evaluation.metrics.items():
        yield "octet_job_evaluation_metric", value, (name,)


def _values_of_attempt(job: JobRow, attempt: AttemptRow) -> Iterator[Value]:
    if attempt.created_at >= job.queued_at:  # otherwise the job is back in the queue
        yield "octet_job_last_queue_wait_seconds", (attempt.created_at - job.queued_at).total_seconds(), ()
    if attempt.last_report_at is not None and not attempt.state.is_terminal:
        yield "octet_job_last_report_timestamp_seconds", attempt.last_report_at.timestamp(), ()
    for phase in START_PHASES:
        reached: datetime | None = getattr(attempt, f"{phase}_at")
        if reached is not None:
            yield "octet_job_start_seconds", (reached - attempt.created_at).total_seconds(), (phase,)
