"""reserved → launching → starting: hand attempts to the cluster.

Claim the row, call the cluster outside any transaction, write the result only if the claim is still ours. Whoever dies in
between leaves a claim that ends; the next one asks the cluster before it launches, and adopts what it finds.
"""

import hashlib
import logging
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from api_schemas import AttemptRef, CheckpointRef, FailureReason, JobSpec, LaunchOrder, PoolConfig, ProbeState
from service.cluster.launcher import LauncherError
from service.db.tables import AttemptRow, JobRow
from service.dispatcher.work import Work
from service.jobs import attempts, store, store_queue, store_records
from service.jobs.attempts import Ending
from service.jobs.lifecycle import AttemptEvent, next_attempt_state

CHECKPOINTS_OFFERED = 10
CLAIMS_AT_ONCE = 16
RETRY_AFTER_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """An attempt that is ours to launch until `claim_token` is gone from its row."""

    claim_token: str
    order: LaunchOrder
    launched_before: bool

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(attempt_id=self.order.attempt_id, epoch=self.order.epoch)


def step(work: Work) -> None:
    with work.database.read() as session:
        if not store_queue.attempts_to_launch(session, work.database.now(session)):
            return
    with work.write() as (session, now):
        rows = store_queue.attempts_to_launch(session, now)[:CLAIMS_AT_ONCE]
        claims = [claim for row in rows if (claim := _claim(work, session, row.id, now)) is not None]
    work.each(lambda claim: _launch(work, claim), claims)


def _claim(work: Work, session: Session, attempt_id: str, now: datetime) -> Claim | None:
    locked = store.lock_attempt(session, attempt_id)
    assert locked is not None
    job, attempt = locked
    if attempt.state.is_terminal:
        return None
    pool = work.settings.pool(attempt.pool)
    if pool is None:
        message = f"pool {attempt.pool!r} is not configured any more"
        attempts.finish(session, job, attempt, Ending(AttemptEvent.FAIL, FailureReason.LAUNCH_FAILED, message), now)
        return None
    launched_before = attempt.token_hash is not None
    token = secrets.token_urlsafe(32)
    attempt.state = next_attempt_state(attempt.state, AttemptEvent.CLAIM)
    attempt.claim_token = secrets.token_hex(16)
    attempt.claim_expires_at = now + timedelta(seconds=work.settings.launch_timeout_s)
    if not launched_before:
        attempt.token_hash = hashlib.sha256(token.encode()).digest()
    return Claim(attempt.claim_token, _order(work, session, job, attempt, pool, token), launched_before)


def _order(work: Work, session: Session, job: JobRow, attempt: AttemptRow, pool: PoolConfig, token: str) -> LaunchOrder:
    newest = store_records.newest_checkpoints(session, job.id, CHECKPOINTS_OFFERED)
    return LaunchOrder(
        attempt_id=attempt.id,
        job_id=job.id,
        epoch=attempt.epoch,
        token=token,
        spec=JobSpec.read_stored(job.spec),
        pool=pool,
        report_url=work.settings.effective_report_url,
        job_dir=str(work.settings.job_dir(job.id)),
        checkpoints=tuple(CheckpointRef(step=row.step, name=row.name, sha256=row.sha256) for row in newest),
        lease_s=work.settings.lease_s,
        heartbeat_s=work.settings.heartbeat_s,
    )


def _launch(work: Work, claim: Claim) -> None:
    try:
        if claim.launched_before and not _is_absent(work, claim):
            _apply(work, claim)
            return
        if claim.launched_before and not _renew_token(work, claim):
            return
        work.launcher.launch(claim.order)
    except LauncherError as error:
        logger.warning("attempt %s was not launched: %s", claim.order.attempt_id, error)
        _postpone_or_fail(work, claim, error)
        return
    _apply(work, claim)


def _is_absent(work: Work, claim: Claim) -> bool:
    """Whether an earlier launch left nothing. Its processes, if any, know the token of that launch and are adopted."""
    probe = work.launcher.probe(claim.ref)
    if probe.state is ProbeState.UNREACHABLE:
        raise LauncherError(probe.message or "the cluster does not answer", retryable=True)
    return probe.state is ProbeState.ABSENT


def _renew_token(work: Work, claim: Claim) -> bool:
    """Replace the token of a launch that left nothing; whether the claim is still ours."""
    with work.write() as (session, _):
        claimed = _claimed(session, claim)
        if claimed is not None:
            claimed[1].token_hash = hashlib.sha256(claim.order.token.encode()).digest()
    return claimed is not None


def _apply(work: Work, claim: Claim) -> None:
    with work.write() as (session, now):
        claimed = _claimed(session, claim)
        if claimed is None:
            return
        job, attempt = claimed
        attempt.claim_token = attempt.claim_expires_at = None
        if attempt.state.is_terminal:
            attempt.released_at = None  # it ended while we launched it: `clean` has to stop what is there now
        else:
            attempts.launched(session, job, attempt, now)


def _postpone_or_fail(work: Work, claim: Claim, error: LauncherError) -> None:
    with work.write() as (session, now):
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
    locked = store.lock_attempt(session, claim.order.attempt_id)
    return locked if locked is not None and locked[1].claim_token == claim.claim_token else None
