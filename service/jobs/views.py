"""Converts rows into what the API shows. Reading is tolerant: rows of an older version still load."""

import json
import math
from typing import Any

from api_schemas import (
    Attempt,
    Checkpoint,
    Event,
    Job,
    JobSpec,
    JobSummary,
    LogLine,
    MetricPoint,
    Progress,
    QueuePlace,
    StartTimes,
)
from service.db.tables import AttemptRow, CheckpointRow, EventRow, JobRow, LogLineRow, MetricRow


class _KnownSpecs:
    """The specs of the jobs that were shown last: parsed, by the stored text, and rendered with their recipe for the answer."""

    def __init__(self, max_specs: int) -> None:
        self._max_specs = max_specs
        self._parsed: dict[str, JobSpec] = {}
        self._rendered: dict[int, tuple[JobSpec, str]] = {}

    def parsed(self, row: JobRow) -> JobSpec:
        """Return the parsed spec of a row."""
        stored = row.__dict__.get("spec_text")
        if stored is None:
            return JobSpec.read_stored(row.spec)
        spec = self._parsed.get(stored)
        if spec is None:
            spec = JobSpec.read_stored(json.loads(stored))
            _make_room(self._parsed, self._max_specs)
            self._parsed[stored] = spec
        return spec

    def rendered(self, job: Job) -> str:
        """Return the last fields of a shown job as JSON: recipe and spec."""
        known = self._rendered.get(id(job.spec))
        if known is not None and known[0] is job.spec:
            return known[1]
        text = job.model_dump_json(include=_OF_SPEC).removeprefix("{")
        _make_room(self._rendered, self._max_specs)
        self._rendered[id(job.spec)] = job.spec, text
        return text


def _make_room(kept: dict[Any, Any], limit: int) -> None:
    if len(kept) >= limit:
        kept.clear()


_OF_SPEC = {"recipe", "spec"}  # the last fields of `Job`, in this order
_KNOWN = _KnownSpecs(1024)


def job(row: JobRow, attempt: AttemptRow | None, queue: QueuePlace | None, spec: JobSpec | None = None) -> Job:
    """Show a job with its current attempt and, while it is queued, its place in the queue.

    `spec` is the job's spec where the caller has it; otherwise the stored one is parsed.
    """
    spec = spec or _KNOWN.parsed(row)
    return Job(
        id=row.id,
        name=row.name,
        tenant=row.tenant,
        state=row.state,
        desired_state=row.desired,
        priority=row.priority,
        labels=spec.labels,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        reason=row.reason,
        message=row.message,
        hint=row.reason.hint if row.reason else None,
        num_attempts=row.num_attempts,
        num_failures=row.num_failures + row.num_platform_failures,
        current_attempt_id=row.current_attempt_id,
        queue=queue,
        progress=_progress(row, spec),
        start=_start_times(row, attempt),
        summary=JobSummary.read_stored(row.summary) if row.summary else None,
        recipe=spec.precision.resolved_recipe,
        spec=spec,
    )


def job_json(shown: Job) -> str:
    """Render a job as `model_dump_json` does. The spec, which takes most of that time, is rendered once for many answers."""
    return f"{shown.model_dump_json(exclude=_OF_SPEC)[:-1]},{_KNOWN.rendered(shown)}"


def new_job(row: JobRow, queue: QueuePlace, spec: JobSpec) -> Job:
    """Show a job that was just submitted. Nothing is validated again, which would take most of the time."""
    return Job.model_construct(
        id=row.id,
        name=row.name,
        tenant=row.tenant,
        state=row.state,
        desired_state=row.desired,
        priority=row.priority,
        labels=spec.labels,
        created_at=row.created_at,
        started_at=None,
        finished_at=None,
        reason=None,
        message=None,
        hint=None,
        num_attempts=0,
        num_failures=0,
        current_attempt_id=None,
        queue=queue,
        progress=None,
        start=StartTimes(accepted_at=row.created_at),
        summary=None,
        recipe=spec.precision.resolved_recipe,
        spec=spec,
    )


def new_job_json(shown: Job, spec_text: str) -> str:
    """Render a job as `job_json` does. spec_text: its spec as JSON."""
    recipe = "null" if shown.recipe is None else shown.recipe.model_dump_json()
    return f'{shown.model_dump_json(exclude=_OF_SPEC)[:-1]},"recipe":{recipe},"spec":{spec_text}}}'


def attempt(row: AttemptRow) -> Attempt:
    shown = {name: getattr(row, name) for name in Attempt.model_fields if name != "object"}
    return Attempt(**shown)


def event(row: EventRow) -> Event:
    return Event(
        id=row.id,
        job_id=row.job_id,
        seq=row.seq,
        at=row.at,
        type=row.type,
        attempt_id=row.attempt_id,
        message=row.message,
        data=row.data,
    )


def log_line(row: LogLineRow) -> LogLine:
    return LogLine(seq=row.seq, at=row.at, attempt_id=row.attempt_id, rank=row.rank, level=row.level, message=row.message)


def metric_point(row: MetricRow) -> MetricPoint:
    return MetricPoint(
        step=row.step,
        at=row.at,
        attempt_id=row.attempt_id,
        loss=row.loss,
        gradient_norm=row.gradient_norm,
        learning_rate=row.learning_rate,
        tokens=row.tokens,
        step_time_s=row.step_time_s,
        data_wait_s=row.data_wait_s,
        tokens_per_s=row.tokens / row.step_time_s if row.step_time_s > 0 else 0.0,
        evaluation_loss=row.evaluation_loss,
        evaluation_perplexity=perplexity(row.evaluation_loss),
        evaluation_metrics=row.evaluation_metrics or {},
    )


def checkpoint(row: CheckpointRow) -> Checkpoint:
    return Checkpoint(
        id=row.id,
        job_id=row.job_id,
        attempt_id=row.attempt_id,
        step=row.step,
        created_at=row.created_at,
        num_bytes=row.num_bytes,
        sha256=row.sha256,
        loss=row.loss,
    )


def _progress(row: JobRow, spec: JobSpec) -> Progress | None:
    if row.step is None or row.reported_at is None:
        return None
    steps = row.steps or spec.training.steps
    assert steps is not None, "a job that has begun knows its steps"
    return Progress(
        step=row.step,
        steps=steps,
        loss=row.loss,
        tokens_per_s=row.tokens_per_s,
        remaining_s=row.remaining_s,
        reported_at=row.reported_at,
    )


def _start_times(row: JobRow, attempt: AttemptRow | None) -> StartTimes:
    phases = [name for name in StartTimes.model_fields if name != "accepted_at"]
    reached = {name: getattr(attempt, name) for name in phases} if attempt else {}
    return StartTimes(accepted_at=row.created_at, **reached)


def perplexity(loss: float | None) -> float | None:
    """exp(loss), or None if that is too large for a float."""
    return math.exp(loss) if loss is not None and loss < 700 else None
