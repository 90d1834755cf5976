"""Compare jobs that are there already: sort them into arms by what their specs differ in, and pair those of the same seed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octet.api_schemas import Job, JobState
from octet.api_schemas.comparison import Arm, EvaluatedPoint, Outcome, outcome_of
from octet.api_schemas.comparison_report import ComparisonReport, Question, report_of
from octet.api_schemas.curve import CurveEvaluations

_OF_EVERY_JOB = ("name", "labels", "priority", "retry", "training.seed")
"""Fields that make no arm of its own."""

Fields = dict[str, Any]


def compare_jobs(
    jobs: Sequence[Job], evaluations: Mapping[str, CurveEvaluations], tolerance: float
) -> tuple[ComparisonReport, tuple[str, ...]]:
    """Return the report of jobs, and which of them cannot be paired, with the reason.

    The arm of the first job is the baseline. evaluations: by the job's id. Raises ValueError if all jobs are of one arm.
    """
    by_arm: dict[str, list[Job]] = {}
    fields: dict[str, Fields] = {}
    for job in jobs:
        found = _fields(job.spec.model_dump(mode="json"))
        key = json.dumps(found, sort_keys=True)
        by_arm.setdefault(key, []).append(job)
        fields[key] = found
    if len(by_arm) < 2:
        raise ValueError("got jobs that differ in nothing but seed and name; allowed: jobs of two arms. Name others.")
    outcomes: dict[tuple[int, int], Outcome] = {}
    left_out: list[str] = []
    for number, of_arm in enumerate(by_arm.values()):
        for job in of_arm:
            place = number, job.spec.training.seed
            if place in outcomes:
                left_out.append(f"{job.name} ({job.id}): an earlier one has the same fields and seed")
            elif not job.state.is_terminal:
                left_out.append(f"{job.name} ({job.id}): it is {job.state.value}")
            else:
                outcomes[place] = _outcome(job, evaluations.get(job.id), is_baseline=number == 0)
    seeds = sorted({job.spec.training.seed for job in jobs})
    missing = Outcome(kind="left_out", why="no job that is over has it")
    everywhere = {(arm, seed): outcomes.get((arm, seed), missing) for arm in range(len(by_arm)) for seed in seeds}
    question = Question(_arms(list(fields.values())), 0, seeds, tolerance, is_sequential=False)
    report = report_of(question, everywhere)
    return report, (*left_out, *report.left_out)


def _outcome(job: Job, evaluated: CurveEvaluations | None, *, is_baseline: bool) -> Outcome:
    points = []
    for place, step in enumerate(evaluated.step if evaluated else ()):
        assert evaluated is not None
        metrics = {name: column[place] for name, column in evaluated.metrics.items()}
        points.append(EvaluatedPoint(step=step, loss=evaluated.loss[place], metrics=metrics))
    outcome = outcome_of(job.state, job.summary, job.reason, job.message, points)
    if is_baseline and job.state is JobState.FAILED:  # of a comparison it is the end; here the other seeds can be compared
        return Outcome(kind="left_out", why=f"its job failed ({outcome.why})")
    return outcome


def _fields(document: Mapping[str, Any], above: str = "") -> Fields:
    """Return the values of a spec by path, without those that make no arm."""
    found: Fields = {}
    for name, value in document.items():
        path = f"{above}.{name}" if above else name
        if path in _OF_EVERY_JOB:
            continue
        if isinstance(value, Mapping) and value:
            found |= _fields(value, path)
        else:
            found[path] = value
    return found


def _arms(fields: Sequence[Fields]) -> list[Arm]:
    """Name arms by the fields in which they differ; a level by its name alone."""
    paths = sorted({path for each in fields for path in each})
    differing = [path for path in paths if any(each.get(path) != fields[0].get(path) for each in fields)]
    arms = []
    for each in fields:
        change = {path: each.get(path) for path in differing}
        texts = {path: value if isinstance(value, str) else json.dumps(value) for path, value in change.items()}
        name = ", ".join(text if path == "precision.level" else f"{path}={text}" for path, text in texts.items())
        arms.append(Arm(name=name, change={path: text for path, text in texts.items()}))
    return arms
