"""Launches attempts on the cluster: reserved → launching → starting.

Claim the row, call the cluster outside any transaction, write the result only if the claim is still ours. A dispatcher
that dies in between leaves a claim that expires. The next one asks the cluster first, and adopts an attempt that it finds.
"""

import hashlib
import logging
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from octet.api_schemas import AttemptRef, CheckpointRef, FailureReason, JobSpec, LaunchOrder, PoolConfig, ProbeState
from octet.api_schemas.models import families_with
from octet.service import store
from octet.service.cluster.launcher import LauncherError
from octet.service.db.tables import AttemptRow, JobRow
from octet.service.dispatcher.context import DispatcherContext
from octet.service.jobs import attempts
from octet.service.jobs.attempts import Ending
from octet.service.jobs.lifecycle import AttemptEvent, next_attempt_state
from octet.service.logs import fields_of_job, log_fields

CHECKPOINTS_OFFERED = 10
CLAIMS_AT_ONCE = 16
RETRY_AFTER_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """An attempt that is ours to launch for as long as `claim_token` stands in its row."""

    claim_token: str
    order: LaunchOrder
    launched_before: bool

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(attempt_id=self.order.attempt_id, epoch=self.order.epoch)


def step(context: DispatcherContext) -> None:
    with context.database.read() as session:
        if not store.queue.attempts_to_launch(session, context.database.now(session)):
            return
    with context.write() as (session, now):
        rows = store.queue.attempts_to_launch(session, now)[:CLAIMS_AT_ONCE]
        for job_id in sorted({row.job_id for row in rows}):
            store.jobs.lock_job(session, job_id)  # as all do that lock several jobs, so that none waits for another in a circle
        claims = [claim for row in rows if (claim := _claim(context, session, row.id, now)) is not None]
    context.each(lambda claim: _launch_one(context, claim), claims)


def _claim(context: DispatcherContext, session: Session, attempt_id: str, now: datetime) -> Claim | None:
    locked = store.jobs.lock_attempt(session, attempt_id)
    if locked is None or locked[1].state.is_terminal:
        return None
    job, attempt = locked
    pool = context.settings.pool(attempt.pool)
    is_users_code = job.spec["model"].get("family") in families_with("users_code") or bool(job.spec.get("evaluation"))
    is_refused = pool is not None and is_users_code and not pool.allows_entrypoints
    if pool is None or is_refused:
        now_says = "allows no code of users (allows_entrypoints) any more" if is_refused else "is not configured any more"
        message = f"pool {attempt.pool!r} {now_says}"
        attempts.finish(session, job, attempt, Ending(AttemptEvent.FAIL, FailureReason.LAUNCH_FAILED, message), now)
        return None
    launched_before = attempt.token_hash is not None
    token = secrets.token_urlsafe(32)
    attempt.state = next_attempt_state(attempt.state, AttemptEvent.CLAIM)
    attempt.claim_token = secrets.token_hex(16)
    attempt.claim_expires_at = now + timedelta(seconds=context.settings.launch_timeout_s)
    if not launched_before:
        attempt.token_hash = hashlib.sha256(token.encode()).digest()
    return Claim(attempt.claim_token, _order(context, session, job, attempt, pool, token), launched_before)


def _order(
    context: DispatcherContext, session: Session, job: JobRow, attempt: AttemptRow, pool: PoolConfig, token: str
) -> LaunchOrder:
    spec = JobSpec.read_stored(job.spec).with_workers(attempt.workers)
    user = pool.of_tenant(job.tenant).user
    newest = store.records.newest_checkpoints(session, job.id, CHECKPOINTS_OFFERED)
    return LaunchOrder(
        attempt_id=attempt.id,
        job_id=job.id,
        epoch=attempt.epoch,
        token=token,
        spec=spec,
        pool=pool,
        report_url=context.settings.effective_report_url,
        report_ca=context.settings.report_ca,
        report_name=context.settings.report_name,
        data_roots=tuple(str(root) for root in context.settings.named_roots),
        stores=context.settings.store_access_of(user),
        user=user,
        job_dir=str(context.settings.job_dir(job.id)),
        checkpoints=tuple(CheckpointRef(step=row.step, name=row.name, sha256=row.sha256) for row in newest),
        trackers=spec.trackers.with_operators(context.settings.trackers),
        traceparent=job.traceparent,
        lease_s=context.settings.lease_s,
        heartbeat_s=context.settings.heartbeat_s,
    )


def _launch_one(context: DispatcherContext, claim: Claim) -> None:
    order = claim.order
    with log_fields(fields_of_job(order.job_id, order.attempt_id, order.traceparent)):
        _launch(context, claim)


def _launch(context: DispatcherContext, claim: Claim) -> None:
    try:
        if claim.launched_before and not _is_absent(context, claim):
            _apply(context, claim)
            return
        if claim.launched_before and not _renew_token(context, claim):
            return
        context.launcher.launch(claim.order)
    except LauncherError as error:
        logger.warning("attempt %s was not launched: %s", claim.order.attempt_id, error)
        _postpone_or_fail(context, claim, error)
        return
    _apply(context, claim)


def _is_absent(context: DispatcherContext, claim: Claim) -> bool:
    """True if the earlier launch left no processes. Processes that exist know that launch's token, and are adopted."""
    probe = context.launcher.probe(claim.ref)
    if probe.state is ProbeState.UNREACHABLE:
        raise LauncherError(probe.message or "the cluster does not answer", retryable=True)
    return probe.state is ProbeState.ABSENT


def _renew_token(context: DispatcherContext, claim: Claim) -> bool:
    """Replace the token of a launch that left nothing. Returns False if the claim is no longer ours."""
    with context.write() as (session, _):
        claimed = _claimed(session, claim)
        if claimed is not None:
            claimed[1].token_hash = hashlib.sha256(claim.order.token.encode()).digest()
    return claimed is not None


def _apply(context: DispatcherContext, claim: Claim) -> None:
    with context.write() as (session, now):
        claimed = _claimed(session, claim)
        if claimed is None:
            if store.jobs.lock_job(session, claim.order.job_id) is None:
                # Its processes are orphans now, which may make the folder again before they are ended.
                store.jobs.note_deleted(session, claim.order.job_id, now)
            return
        job, attempt = claimed
        attempt.claim_token = attempt.claim_expires_at = None
        if attempt.state.is_terminal:
            attempt.released_at = None  # it ended during the launch: `release` has to stop the new processes
        else:
            attempts.launched(session, job, attempt, now)
            logger.info("job %s (%s): attempt %d is on the cluster", job.id, job.name, attempt.epoch)


def _postpone_or_fail(context: DispatcherContext, claim: Claim, error: LauncherError) -> None:
    with context.write() as (session, now):
        claimed = _claimed(session, claim)
        if claimed is None:
            return
        job, attempt = claimed
        attempt.claim_token = attempt.claim_expires_at = None
        attempt.launch_after = now + timedelta(seconds=RETRY_AFTER_S)
        if not attempt.state.is_terminal and not error.retryable:
            ending = Ending(AttemptEvent.FAIL, FailureReason.LAUNCH_FAILED, str(error))
            attempts.finish(session, job, attempt, ending, now)


def _claimed(session: Session, claim: Claim) -> tuple[JobRow, AttemptRow] | None:
    locked = store.jobs.lock_attempt(session, claim.order.attempt_id)
    return locked if locked is not None and locked[1].claim_token == claim.claim_token else None
