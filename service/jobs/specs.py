"""Specs made of others: of a clone, of the jobs of a batch, of a job that goes on to more steps or at another level."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from octet.api_schemas import JobSpec, explain
from octet.api_schemas.base import merge_patch
from octet.api_schemas.job import MAX_SPEC_BYTES
from octet.api_schemas.job_batch import JobBatch
from octet.service.db.tables import JobRow
from octet.service.errors import MOST_VIOLATIONS, InvalidRequest, PayloadTooLarge


def changed(spec: JobSpec, patch: Mapping[str, Any], *, with_defaults: bool = True) -> JobSpec:
    """Apply a JSON merge patch to a spec, and check the result as a new job.

    with_defaults: what the spec leaves out has its default, also where that follows from a field that is patched. Raises
    InvalidRequest, and PayloadTooLarge for a job that could not be submitted in one piece.
    """
    try:
        result = JobSpec.model_validate(merge_patch(spec.model_dump(mode="json", exclude_unset=not with_defaults), patch))
    except ValidationError as error:
        violations = explain(error, JobSpec)
        raise InvalidRequest.of(violations[:MOST_VIOLATIONS], len(violations[MOST_VIOLATIONS:])) from error
    num_bytes = len(result.model_dump_json().encode())
    if num_bytes > MAX_SPEC_BYTES:
        raise PayloadTooLarge(f"the job would have {num_bytes} bytes with the patch; allowed: {MAX_SPEC_BYTES}")
    return result


def specs_of(batch: JobBatch) -> list[JobSpec]:
    """Return the jobs of a batch. Raises InvalidRequest for the first that is no valid job, with its number."""
    specs = []
    for number, patch in enumerate(batch.changes):
        with naming(number):
            specs.append(changed(batch.job, patch, with_defaults=False))
    return specs


@contextmanager
def naming(number: int) -> Iterator[None]:
    """Put the number of a batch's change before the fields that are refused in it."""
    try:
        yield
    except InvalidRequest as error:
        fields = (f"changes.{number}.{violation.field}".removesuffix(".") for violation in error.errors)
        renamed = zip(error.errors, fields, strict=True)
        raise InvalidRequest.of(tuple(violation.model_copy(update={"field": field}) for violation, field in renamed)) from error


def patch_spec(job: JobRow, patch: Mapping[str, Any]) -> None:
    """Change a stored spec, once the result is checked. What it lacks because it is older, it lacks afterwards too."""
    changed(JobSpec.read_stored(job.spec), patch)
    job.spec = merge_patch(job.spec, patch)


def put_level(job: JobRow, patch: Mapping[str, Any]) -> None:
    """Change the level at which a job goes on. It is planned again."""
    patch_spec(job, patch)
    job.level = job.spec["precision"]["level"]
    job.plan = None
