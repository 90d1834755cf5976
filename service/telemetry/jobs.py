"""What each job last reported, for Prometheus. A job too short to be scraped itself is visible here.

Shown are at most `MAX_JOBS` jobs, live or just ended, with at most `MAX_SERIES` series each; the rest is left out and
counted. A job's name and its `comparison` label are the user's words, so only `octet_job_info` carries them.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.orm import Session

from service import store
from service.db.engine import Database
from service.db.tables import AttemptRow, CheckpointRow, JobRow, MetricRow
from service.jobs import reports, views

MAX_JOBS = 200
MAX_SERIES = 44
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
    "octet_job_evaluation_perplexity": "exp of the loss of the last evaluation",
    "octet_job_evaluation_metric": "what the model's family measures besides the loss, such as accuracy, last evaluation",
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
    "octet_job_memory_bytes": "bytes on rank 0 by class, of a job that succeeded",
}
_LABELS = {
    "octet_job_info": ("name", COMPARISON),
    "octet_job_state": ("state",),
    "octet_job_start_seconds": ("phase",),
    "octet_job_memory_bytes": ("class",),
    "octet_job_evaluation_metric": ("metric",),
}


class Reported(NamedTuple):
    """A job with the last value of everything it reported."""

    job: JobRow
    attempt: AttemptRow | None
    metric: MetricRow | None
    evaluation: MetricRow | None
    checkpoint: CheckpointRow | None


Value = tuple[str, float | None, tuple[str, ...]]


class JobsCollector(Collector):
    """Collects the last values of jobs from the database at each scrape."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._num_dropped = 0
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        return []  # otherwise registering would collect, and read the database

    def collect(self) -> Iterable[Metric]:
        with self._database.read() as session:
            now = self._database.now(session)
            jobs = store.jobs.jobs_to_show(session, now - ENDED_SHOWN_FOR, MAX_JOBS)
            num_hidden = store.jobs.count_jobs_to_show(session, now - ENDED_SHOWN_FOR) - len(jobs)
            families = self._families(_reported(session, jobs), now)
        families.append(
            GaugeMetricFamily("octet_jobs_hidden", "live or recent jobs without series of their own", value=num_hidden)
        )
        return families

    def _families(self, jobs: Iterable[Reported], now: datetime) -> list[Metric]:
        families = {
            name: GaugeMetricFamily(name, text, labels=["job_id", "tenant", "pool", "level", *_LABELS.get(name, ())])
            for name, text in HELP.items()
        }
        num_series: Counter[str] = Counter()
        num_dropped = 0
        for reported in jobs:
            job = reported.job
            for name, value, labels in _values(reported):
                if value is None:
                    continue
                if num_series[job.id] == MAX_SERIES:
                    num_dropped += 1
                    continue
                num_series[job.id] += 1
                families[name].add_metric([job.id, job.tenant, job.pool, job.spec["precision"]["level"], *labels], value)
        with self._lock:
            self._num_dropped += num_dropped
            dropped = CounterMetricFamily(
                "octet_exporter_dropped_series_total",
                "series left out of answers because of the budget",
                value=self._num_dropped,
            )
        return [*families.values(), dropped]


def _reported(session: Session, jobs: list[JobRow]) -> Iterator[Reported]:
    attempts = store.jobs.current_attempts(session, jobs)
    ids = [job.id for job in jobs]
    metrics = store.records.last_metrics(session, ids)
    evaluations = store.records.last_evaluations(session, ids)
    checkpoints = store.records.last_checkpoints(session, ids)
    for job in jobs:
        found = (attempts.get(job.id), metrics.get(job.id), evaluations.get(job.id), checkpoints.get(job.id))
        yield Reported(job, *found)


def _values(reported: Reported) -> Iterator[Value]:
    job, attempt, metric, evaluation, checkpoint = reported
    yield "octet_job_info", 1.0, (job.name, job.spec["labels"].get(COMPARISON, "")[:_LONGEST_LABEL])
    yield "octet_job_state", 1.0, (job.state.value,)
    yield "octet_job_steps", job.num_steps, ()
    yield "octet_job_step", job.step, ()
    yield "octet_job_loss", job.loss, ()
    yield "octet_job_tokens_per_second", job.tokens_per_s, ()
    yield "octet_job_remaining_seconds", job.remaining_s, ()
    yield "octet_job_attempts", job.num_attempts, ()
    yield "octet_job_failures", job.num_failures + job.num_platform_failures, ()
    yield "octet_job_started_timestamp_seconds", job.started_at.timestamp() if job.started_at else None, ()
    if metric is not None:
        yield "octet_job_gradient_norm", metric.gradient_norm, ()
        yield "octet_job_learning_rate", metric.learning_rate, ()
        yield "octet_job_step_duration_seconds", metric.step_time_s, ()
        yield "octet_job_data_wait_seconds", metric.data_wait_s, ()
        every = job.spec["training"]["checkpoint_every"]
        yield "octet_job_checkpoint_interval_seconds", every * metric.step_time_s if every else None, ()
    if evaluation is not None:
        yield from _values_of_evaluation(evaluation)
    if checkpoint is not None:
        yield "octet_job_last_checkpoint_timestamp_seconds", checkpoint.created_at.timestamp(), ()
        yield "octet_job_last_checkpoint_step", checkpoint.step, ()
    if attempt is not None:
        yield from _values_of_attempt(job, attempt)
    for kind, num_bytes in ((job.summary or {}).get("memory_bytes") or {}).items():
        yield "octet_job_memory_bytes", num_bytes, (kind,)


def _values_of_evaluation(evaluation: MetricRow) -> Iterator[Value]:
    yield "octet_job_evaluation_loss", evaluation.evaluation_loss, ()
    yield "octet_job_evaluation_perplexity", views.perplexity(evaluation.evaluation_loss), ()
    for name, value in (evaluation.evaluation_metrics or {}).items():
        yield "octet_job_evaluation_metric", value, (name,)


def _values_of_attempt(job: JobRow, attempt: AttemptRow) -> Iterator[Value]:
    if attempt.created_at >= job.queued_at:  # otherwise the job is back in the queue
        yield "octet_job_last_queue_wait_seconds", (attempt.created_at - job.queued_at).total_seconds(), ()
    if attempt.last_report_at is not None and not attempt.state.is_terminal:
        yield "octet_job_last_report_timestamp_seconds", attempt.last_report_at.timestamp(), ()
    for phase in reports.START_PHASES:
        reached: datetime | None = getattr(attempt, f"{phase}_at")
        if reached is not None:
            yield "octet_job_start_seconds", (reached - attempt.created_at).total_seconds(), (phase,)
