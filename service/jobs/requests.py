"""Requests for jobs, and the idempotency keys that make a repeated request the same job."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from sqlalchemy.orm import Session

from octet.api_schemas import JobSpec
from octet.api_schemas.keys import DEFAULT_TENANT
from octet.service import store
from octet.service.db.bulk import Transaction, session_of
from octet.service.db.engine import Database
from octet.service.db.tables import JobRow
from octet.service.errors import IdempotencyMismatch
from octet.service.logs import bound_fields
from octet.service.store.ids import is_id
from octet.service.store.jobs import NewJob, TakenKey


def body_hash_of(sent: bytes | str) -> str:
    """Return the hash of a request in JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(json.loads(sent), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def key_in_batch(key: str | None, number: int) -> str | None:
    """Return the idempotency key of one of the jobs of a batch, given the batch's."""
    return None if key is None else f"{hashlib.sha256(key.encode()).hexdigest()}-{number}"


@dataclass(frozen=True)
class Request:
    """A job to submit, for a tenant."""

    spec: JobSpec
    idempotency_key: str | None = None
    tenant: str = DEFAULT_TENANT
    sent: bytes | None = None
    """The request as it was sent, in JSON; None for one that was made here."""
    cloned_from: str | None = None
    """The job whose spec it is, with or without changes."""
    traceparent: str | None = None
    """The span of the request, which the job keeps."""
    log_fields: Mapping[str, str] = field(default_factory=bound_fields, compare=False)
    """The fields of log lines about the request: it may be stored with others, by a thread that has none of them."""

    @cached_property
    def spec_text(self) -> str:
        """The spec as JSON, as it is stored and shown."""
        return self.spec.model_dump_json()

    @cached_property
    def body_hash(self) -> str:
        """The hash of what was sent, whatever the order of its keys: today's defaults are no part of it."""
        return body_hash_of(self.sent or self.spec_text)

    def is_for(self, spec: Mapping[str, Any]) -> bool:
        """Return True if a stored spec is the requested one, however each of them was written."""
        return JobSpec.read_stored(spec) == self.spec


@dataclass(frozen=True)
class Submission:
    """A submitted job. `replayed` is true if an earlier submission with the same idempotency key stored it."""

    job: JobRow | NewJob
    replayed: bool


def earlier(transaction: Transaction, request: Request, key: str, now: datetime, new: Mapping[str, NewJob]) -> Submission:
    """Find the job of a key that is taken. It may be one of this transaction, which is not in the database yet."""
    with session_of(transaction) as session:
        job = _used_for(session, request, key, now, new)
    assert job is not None, "a key that is taken has a job"
    return Submission(job, replayed=True)


def take_keys(transaction: Transaction, requests: Sequence[Request], job_ids: Sequence[str], now: datetime) -> set[str]:
    """Take the keys of requests that are to become jobs with these ids. Returns the jobs that have theirs."""
    keyed: dict[tuple[str, str], TakenKey] = {}
    for request, job_id in zip(requests, job_ids, strict=True):
        key = request.idempotency_key
        if key is not None and (request.tenant, key) not in keyed:
            expires_at = now + store.jobs.IDEMPOTENCY_KEPT
            keyed[request.tenant, key] = TakenKey(request.tenant, key, request.body_hash, job_id, expires_at)
    return store.jobs.take_idempotency_keys(transaction, list(keyed.values()), now) if keyed else set()


def is_replay(database: Database, request: Request) -> bool:
    """Return True if the request's key was used for this job in the last 24 hours.

    Raises IdempotencyMismatch if it was used for another.
    """
    key = request.idempotency_key
    with database.read() as session:
        return key is not None and _used_for(session, request, key, database.now(session), {}) is not None


def _used_for(session: Session, request: Request, key: str, now: datetime, new: Mapping[str, NewJob]) -> JobRow | NewJob | None:
    """Find the job that a key was used for. Raises IdempotencyMismatch if another one was asked for then, or it is deleted.

    The same was asked for if the same was sent, or if it means the same: a key of an older version has another hash.
    """
    used = store.jobs.find_idempotency_key(session, request.tenant, key, now)
    if used is None:
        return None
    job = new.get(used.job_id) or store.jobs.find_job(session, used.job_id)
    if job is None:
        what = "which is deleted" if is_id("job", used.job_id) else "which is no job"
        raise IdempotencyMismatch(f"Idempotency-Key {key!r} was used for {used.job_id}, {what}. Use a new key.")
    spec = json.loads(job.spec_text) if isinstance(job, NewJob) else job.spec
    if used.body_hash != request.body_hash and not request.is_for(spec):
        raise IdempotencyMismatch(
            f"Idempotency-Key {key!r} was used for another job, {used.job_id}. Use a new key for a new job."
        )
    return job
