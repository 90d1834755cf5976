"""Converts rows into what the API shows. Reading is tolerant: rows of an older version still load."""

import json
import math
from functools import lru_cache
from typing import TypeVar

from octet.api_schemas import Contract, Job, JobSpec, JobSummary, MetricPoint, Progress, QueuePlace, StartTimes
from octet.api_schemas.job import FailureCount, RetrySpec
from octet.api_schemas.job_plan import JobPlan
from octet.service.jobs import retries
from octet.service.store.curves import Point
from octet.service.store.job_queries import ShownRow

Record = TypeVar("Record", bound=Contract)


@lru_cache(maxsize=1024)
def _parsed(spec_text: str) -> JobSpec:
    """Parse a stored spec, which takes most of the time of an answer, once for many answers."""
    return JobSpec.read_stored(json.loads(spec_text))


def job(row: ShownRow, queue: QueuePlace | None, spec: JobSpec | None = None) -> Job:
    """Show a job without checking again what was checked when it was stored.

    queue: its place while it is queued. spec: the job's spec where the caller has it; otherwise the stored one is parsed.
    """
    spec = spec or _parsed(row.spec_text)
    return Job.model_construct(
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
        failures=_failures(row, spec.retry),
        current_attempt_id=row.current_attempt_id,
        num_ranks=row.num_ranks,
        queue=queue,
        progress=_progress(row, spec.training.steps),
        start=_start_times(row),
        summary=JobSummary.read_stored(row.summary) if row.summary else None,
        recipe=spec.precision.resolved_recipe,
        plan=JobPlan.read_stored(row.plan) if row.plan else None,
        measured_to_planned=row.measured_to_planned,
        trace_id=None if row.traceparent is None else row.traceparent.split("-")[1],
        step_time_to_planned=row.step_time_to_planned,
        spec=spec,
    )


def record(contract: type[Record], row: object) -> Record:
    """Show a row, or the result of a query, that has a field for each of the contract's."""
    return contract(**{name: getattr(row, name) for name in contract.model_fields if name != "object"})


def speed(tokens: int, step_time_s: float) -> float | None:
    """Return the tokens per second of a step, or None if its time is zero, negative, or so short that no float holds them."""
    tokens_per_s = tokens / step_time_s if step_time_s > 0 else math.inf
    return tokens_per_s if math.isfinite(tokens_per_s) else None


def metric_point(row: Point) -> MetricPoint:
    derived = {
        "tokens_per_s": speed(row.tokens, row.step_time_s) or 0.0,
        "evaluation_perplexity": perplexity(row.evaluation_loss),
        "evaluation_metrics": dict(row.evaluation_metrics or {}),
    }
    return MetricPoint.model_validate(row._asdict() | derived)


def _progress(row: ShownRow, steps_of_spec: int | None) -> Progress | None:
    if row.step is None or row.reported_at is None:
        return None
    steps = row.steps or steps_of_spec
    assert steps is not None, "a job that has begun knows its steps"
    return Progress.model_construct(
        step=row.step,
        steps=steps,
        loss=row.loss,
        tokens_per_s=row.tokens_per_s,
        remaining_s=row.remaining_s,
        reported_at=row.reported_at,
    )


def _failures(row: ShownRow, retry: RetrySpec) -> tuple[FailureCount, ...]:
    counts = retries.counts_of(row.failures)
    return tuple(
        FailureCount.model_construct(reason=reason, count=count, retries=retries.budget_of(reason, retry))
        for reason, count in counts.items()
    )


def _start_times(row: ShownRow) -> StartTimes:
    phases = {name: getattr(row, name) for name in StartTimes.model_fields if name != "accepted_at"}
    return StartTimes.model_construct(accepted_at=row.created_at, **phases)


def perplexity(loss: float | None) -> float | None:
    """exp(loss), or None if that is too large for a float."""
    return math.exp(loss) if loss is not None and loss < 700 else None
