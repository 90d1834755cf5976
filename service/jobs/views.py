"""Converts rows into what the API shows. Reading is tolerant: rows of an older version still load."""

import json
import math
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple, TypeVar

import msgspec

from octet.api_schemas import (
    Contract,
    DesiredState,
    Job,
    JobSpec,
    JobState,
    JobSummary,
    MetricPoint,
    Progress,
    QueuePlace,
    StartTimes,
    rfc3339,
)
from octet.api_schemas.recipe import RecipeSpec
from octet.service.db.tables import AttemptRow, JobRow
from octet.service.store.curves import Point
from octet.service.store.job_queries import ShownRow
from octet.service.store.jobs import NewJob

Record = TypeVar("Record", bound=Contract)


class _KnownSpec(NamedTuple):
    """The shown part of a stored spec. `rendered` are the last fields of a shown job as JSON, recipe and spec."""

    labels: dict[str, str]
    steps: int | None
    rendered: str


_OF_SPEC = {"recipe", "spec"}  # the last fields of `Job`, in this order


@lru_cache(maxsize=1024)
def _known_spec(stored: str) -> _KnownSpec:
    """Parse and render a stored spec, which takes most of the time of an answer, once for many answers."""
    spec = JobSpec.read_stored(json.loads(stored))
    fields = Job.model_construct(recipe=spec.precision.resolved_recipe, spec=spec)
    return _KnownSpec(spec.labels, spec.training.steps, fields.model_dump_json(include=_OF_SPEC).removeprefix("{"))


def job(row: JobRow, attempt: AttemptRow | None, queue: QueuePlace | None, spec: JobSpec | None = None) -> Job:
    """Show a job with its current attempt and, while it is queued, its place in the queue.

    `spec` is the job's spec where the caller has it; otherwise the stored one is parsed.
    """
    spec = spec or JobSpec.read_stored(row.spec)
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
        num_ranks=attempt.workers if attempt is not None else None,
        queue=queue,
        progress=_progress(row, spec.training.steps),
        start=_start_times(row.created_at, attempt),
        summary=JobSummary.read_stored(row.summary) if row.summary else None,
        recipe=spec.precision.resolved_recipe,
        spec=spec,
    )


_MOST_RENDERED = 2048
_rendered: dict[str, tuple[ShownRow, QueuePlace | None, str]] = {}  # by job


def job_json(row: ShownRow, queue: QueuePlace | None) -> str:
    """Render a job that is read as `job` and `model_dump_json` would. An answer is kept until row or place differ."""
    known = _rendered.get(row.id)
    if known is not None and known[0] == row and known[1] == queue:
        return known[2]
    text = _render_job(row, queue)
    if len(_rendered) >= _MOST_RENDERED:
        _rendered.clear()
    _rendered[row.id] = row, queue, text
    return text


def _render_job(row: ShownRow, queue: QueuePlace | None) -> str:
    """Render a job without checking again what was checked when it was stored."""
    spec = _known_spec(row.spec_text)
    shown = Job.model_construct(
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
        num_ranks=row.num_ranks,
        queue=queue,
        progress=_progress(row, spec.steps),
        start=_start_times(row.created_at, row),
        summary=JobSummary.read_stored(row.summary) if row.summary else None,
    )
    return f"{shown.model_dump_json(exclude=_OF_SPEC)[:-1]},{spec.rendered}"


def new_job_json(job: NewJob, queue: QueuePlace, spec: JobSpec) -> str:
    """Render a job that was just submitted as `job_json` would. Most of the fields can have one value only."""
    accepted_at = rfc3339(job.created_at)
    shown = {
        "object": "job",
        "id": job.id,
        "name": job.name,
        "tenant": job.tenant,
        "state": JobState.QUEUED,
        "desired_state": DesiredState.RUN,
        "priority": job.priority,
        "labels": job.labels,
        "created_at": accepted_at,
        **_NOT_YET,
        "queue": {"position": queue.position, "why": queue.why},
        "progress": None,
        "start": {"accepted_at": accepted_at, **_NOT_STARTED},
        "summary": None,
    }
    recipe = spec.precision.resolved_recipe
    of_recipe = "null" if recipe is None else _recipe_json(recipe)
    return f'{msgspec.json.encode(shown).decode()[:-1]},"recipe":{of_recipe},"spec":{job.spec_text}}}'


@lru_cache(maxsize=256)
def _recipe_json(recipe: RecipeSpec) -> str:
    return recipe.model_dump_json()


_NOT_YET = {
    "started_at": None,
    "finished_at": None,
    "reason": None,
    "message": None,
    "hint": None,
    "num_attempts": 0,
    "num_failures": 0,
    "current_attempt_id": None,
    "num_ranks": None,
}
_NOT_STARTED = dict.fromkeys([name for name in StartTimes.model_fields if name != "accepted_at"])


def record(contract: type[Record], row: object) -> Record:
    """Show a row, or the result of a query, that has a field for each of the contract's."""
    return contract(**{name: getattr(row, name) for name in contract.model_fields if name != "object"})


def speed(tokens: int, step_time_s: float) -> float | None:
    """Return the tokens per second of a step, or None if its time is zero, negative, or so short that no float holds them."""
    tokens_per_s = tokens / step_time_s if step_time_s > 0 else math.inf
    return tokens_per_s if math.isfinite(tokens_per_s) else None


def metric_point(row: Point) -> MetricPoint:
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
        tokens_per_s=speed(row.tokens, row.step_time_s) or 0.0,
        evaluation_loss=row.evaluation_loss,
        evaluation_perplexity=perplexity(row.evaluation_loss),
        evaluation_metrics=dict(row.evaluation_metrics or {}),
    )


def _progress(row: JobRow | ShownRow, steps_of_spec: int | None) -> Progress | None:
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


def _start_times(accepted_at: datetime, attempt: AttemptRow | ShownRow | None) -> StartTimes:
    if attempt is None:
        return StartTimes.model_construct(accepted_at=accepted_at)
    return StartTimes.model_construct(
        accepted_at=accepted_at,
        placed_at=attempt.placed_at,
        process_up_at=attempt.process_up_at,
        torch_imported_at=attempt.torch_imported_at,
        model_built_at=attempt.model_built_at,
        first_step_at=attempt.first_step_at,
        warmed_up_at=attempt.warmed_up_at,
    )


def perplexity(loss: float | None) -> float | None:
    """exp(loss), or None if that is too large for a float."""
    return math.exp(loss) if loss is not None and loss < 700 else None
