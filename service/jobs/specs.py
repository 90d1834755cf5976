"""Specs made of stored ones: that of a clone, and that of a job that goes on to more steps or at another level."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from octet.api_schemas import JobSpec, explain
from octet.api_schemas.base import merge_patch
from octet.api_schemas.job import MAX_SPEC_BYTES
from octet.service.db.tables import JobRow
from octet.service.errors import MOST_VIOLATIONS, InvalidRequest, PayloadTooLarge


def changed(spec: JobSpec, patch: Mapping[str, Any]) -> JobSpec:
    """Apply a JSON merge patch to a spec with every default filled in, and check the result as a new job.

    Raises InvalidRequest, and PayloadTooLarge for a job that could not be submitted in one piece.
    """
    try:
        result = JobSpec.model_validate(merge_patch(spec.model_dump(mode="json"), patch))
    except ValidationError as error:
        violations = explain(error, JobSpec)
        raise InvalidRequest.of(violations[:MOST_VIOLATIONS], len(violations[MOST_VIOLATIONS:])) from error
    num_bytes = len(result.model_dump_json().encode())
    if num_bytes > MAX_SPEC_BYTES:
        raise PayloadTooLarge(f"the job would have {num_bytes} bytes with the patch; allowed: {MAX_SPEC_BYTES}")
    return result


def patch_spec(job: JobRow, patch: Mapping[str, Any]) -> None:
    """Change a stored spec, once the result is checked. What it lacks because it is older, it lacks afterwards too."""
    changed(JobSpec.read_stored(job.spec), patch)
    job.spec = merge_patch(job.spec, patch)


def put_level(job: JobRow, patch: Mapping[str, Any]) -> None:
    """Change the level at which a job goes on. It is planned again."""
    patch_spec(job, patch)
    job.level = job.spec["precision"]["level"]
    job.plan = None
