"""Applies a plan to its queued job: notes it with the level that it chooses, warns, or refuses the job.

Runs in the caller's transaction with the job's row locked, and before the job's first attempt. A job that has a plan is never
planned again, so all its attempts train at one level.
"""

from datetime import datetime

from sqlalchemy.orm import Session

from octet.api_schemas import FailureReason, JobSpec, JsonScalar
from octet.api_schemas.base import merge_patch
from octet.api_schemas.job_plan import JobPlan
from octet.service import store
from octet.service.db.tables import JobRow
from octet.service.jobs import attempts

MOST_REMEDIES = 6


def apply(session: Session, job: JobRow, plan: JobPlan, now: datetime) -> None:
    """Store a job's plan. A job that cannot fit, and is not forced, ends; so does one at auto for which no level was chosen."""
    job.plan = plan.model_dump(mode="json")
    is_forced = JobSpec.read_stored(job.spec).resources.force
    if plan.level is None:
        why = f"no level was chosen for precision.level auto: {plan.reason}"
        attempts.refuse(session, job, FailureReason.NOT_PLANNED, why[:4096], now)
        return
    if plan.verdict == "no" and not is_forced:
        attempts.refuse(session, job, FailureReason.DOES_NOT_FIT, f"{_room(plan)}. {_remedies(plan)}"[:4096], now)
        return
    if plan.asked_level == "auto":
        job.level = plan.level
        job.spec = merge_patch(job.spec, {"precision": {"level": plan.level}})
    type_, message = _event(plan)
    figures: dict[str, JsonScalar] = {
        "level": plan.level,
        "verdict": plan.verdict,
        "lower_bytes": plan.lower_bytes,
        "upper_bytes": plan.upper_bytes,
        "memory_per_device_bytes": plan.memory_per_device_bytes,
    }
    store.jobs.add_event(session, job, now, type_, message[:4096], data=figures)


def _event(plan: JobPlan) -> tuple[str, str]:
    chosen = f"precision.level auto is {plan.level}; " if plan.asked_level == "auto" else ""
    if plan.verdict == "unknown":
        return "job.not_planned", f"it is placed without a plan: {plan.reason}"
    if plan.verdict == "yes":
        return "job.planned", f"{chosen}{_room(plan)}"
    if plan.verdict == "no":
        return "job.may_not_fit", f"{chosen}{_room(plan)}; it is placed because resources.force is set"
    largest = f"; the largest micro-batch that surely fits is {plan.largest_micro_batch}"
    return "job.may_not_fit", f"{chosen}{_room(plan)}{largest}, now {plan.micro_batch_size}"


def _room(plan: JobPlan) -> str:
    """Say how a job's bounds compare with a device."""
    memory = f"of {_gb(plan.memory_per_device_bytes)}"
    upper = "" if plan.upper_bytes is None else f" to {_gb(plan.upper_bytes)}"
    what = "states alone" if plan.peak_bytes is None else "peak"
    words = {"yes": "fits devices", "tight": "may not fit devices", "no": "does not fit devices"}[plan.verdict]
    return f"{words} {memory}: the {what} of a rank at level {plan.level} is {_gb(plan.lower_bytes or 0)}{upper}"


def _remedies(plan: JobPlan) -> str:
    if plan.remedies:
        return f"It would fit with one of: {', '.join(plan.remedies[:MOST_REMEDIES])}."
    if plan.possible_remedies:
        return f"It may fit, which is not known, with one of: {', '.join(plan.possible_remedies[:MOST_REMEDIES])}."
    return "No level and no single option makes it fit: use more workers, a smaller model, or another pool."


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"
