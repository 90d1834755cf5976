"""Several jobs in one request: all are stored, or none."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from octet.api_schemas.base import Contract, JsonScalar, merge_patch
from octet.api_schemas.comparison import arms_of, nested
from octet.api_schemas.job import Job, JobSpec

MAX_JOBS = 100
SWEEP = "sweep"
"""The label that says what a job of a sweep varies."""


class JobBatch(Contract):
    """One job, and what each of the jobs to submit changes of it."""

    job: JobSpec
    changes: tuple[dict[str, Any], ...] = Field(
        min_length=1, max_length=MAX_JOBS, description="for each job to submit, a JSON merge patch (RFC 7396) of `job`"
    )


class SubmittedJobs(Contract):
    """The jobs of a batch, in the order of its changes."""

    jobs: tuple[Job, ...]


def sweep(vary: Mapping[str, Sequence[JsonScalar]]) -> list[dict[str, Any]]:
    """Return the changes of a batch that varies fields by their paths, each value with each, the last field fastest.

    Each job has a label with its values.
    """
    changes = []
    for arm in arms_of(dict(vary)):
        patch: dict[str, Any] = {"labels": {SWEEP: arm.name[:256]}}
        for path, value in arm.change.items():
            patch = merge_patch(patch, nested(path, value))
        changes.append(patch)
    return changes
