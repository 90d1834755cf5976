"""Decide about a batch of reports: refuse it, or say which of its reports are new. Pure.

A batch may come twice or overlap an earlier one; reports that were applied are skipped by their
sequence number. A batch of an attempt that is no longer the job's current one changes nothing and
is refused, and its rank ends.
"""

import hashlib
import hmac
from collections.abc import Sequence
from typing import NamedTuple

from octet.api_schemas import AttemptState, DesiredState
from octet.api_schemas import report as contracts
from octet.service.errors import InvalidRequest, SequenceGap, StaleAttempt, Unauthenticated
from octet.service.ingest import batches
from octet.service.ingest.batches import Batch, Report, ReportBody, SentBatch
from octet.service.jobs.lifecycle import AttemptEvent, next_attempt_state
from octet.service.store.reporting import AttemptStatus

ENDINGS = {"succeeded": AttemptEvent.SUCCEED, "failed": AttemptEvent.FAIL, "cancelled": AttemptEvent.CANCEL}


class _Rule(NamedTuple):
    """The needs of a kind of report: a sender of any rank or of rank 0, an attempt that trains or any that lives."""

    is_from_any_rank: bool
    is_of_training: bool


_ANY_RANK, _RANK_0, _OF_TRAINING = _Rule(True, False), _Rule(False, False), _Rule(False, True)

RULES: dict[type[ReportBody], _Rule] = {
    contracts.ExporterReport: _ANY_RANK,
    contracts.LogReport: _ANY_RANK,
    contracts.EventReport: _ANY_RANK,
    contracts.FinishedReport: _ANY_RANK,  # of other ranks than 0 only a failure
    contracts.PhaseReport: _RANK_0,
    contracts.StartedReport: _RANK_0,
    batches.StepReport: _OF_TRAINING,
    contracts.EvaluationReport: _OF_TRAINING,
    contracts.CheckpointReport: _OF_TRAINING,
    contracts.ExportReport: _OF_TRAINING,
    contracts.MeasuredReport: _OF_TRAINING,
}


class Accepted(NamedTuple):
    """A batch to apply. `new` are the reports that were not applied before."""

    new: Sequence[Report]


class Repeated(NamedTuple):
    """The last batch of an attempt that is over, again: its rank did not get the answer. Nothing is written."""


def decide(status: AttemptStatus | None, sent: SentBatch) -> Accepted | Repeated:
    """Judge a batch by the status of its attempt, None for an attempt that is not there.

    Raises Unauthenticated for a wrong token or an unknown attempt, StaleAttempt if the attempt is
    not the job's current one, SequenceGap if a report before this batch is missing, InvalidRequest
    for reports that this rank cannot send in this state, and IllegalTransition as the lifecycle does.
    """
    batch = sent.batch
    if not is_hash_of(status.token_hash if status is not None else None, sent.token) or status is None:
        raise Unauthenticated("the token is not this attempt's; end this process")
    if batch.rank >= status.workers:
        raise InvalidRequest(f"rank: got {batch.rank}; allowed: below {status.workers}, the attempt's workers")
    is_over = status.state.is_terminal
    is_repeated = bool(batch.reports) and batch.reports[-1].seq <= status.last_seq
    if batch.epoch != status.epoch or (is_over and not is_repeated):
        raise StaleAttempt(
            f"attempt {sent.attempt_id} has epoch {status.epoch} and is {status.state.value}; got epoch {batch.epoch}. "
            "It no longer counts; end this process."
        )
    if is_over:
        return Repeated()
    new = _unseen(batch.reports, status.last_seq)
    _check_order(status, batch, new)
    return Accepted(new)


def is_hash_of(known: bytes | None, token: str) -> bool:
    """Return True if the hash is the token's. It takes as long where no hash is known."""
    given = hashlib.sha256(token.encode()).digest()
    return hmac.compare_digest(given, known or bytes(len(given))) and known is not None


def _unseen(reports: Sequence[Report], last_seq: int) -> Sequence[Report]:
    if reports and reports[0].seq <= last_seq:
        reports = [report for report in reports if report.seq > last_seq]
    for expected, report in enumerate(reports, start=last_seq + 1):
        if report.seq != expected:
            raise SequenceGap(f"got report {report.seq}; expected {expected}. Send again from {expected}.")
    return reports


def _check_order(status: AttemptStatus, batch: Batch, new: Sequence[Report]) -> None:
    """Follow the attempt's state through the batch, and refuse the first report that it does not allow."""
    state: AttemptState = AttemptState.STARTING if status.state is AttemptState.LAUNCHING else status.state
    for report in new:
        body = report.body
        rule = RULES[type(body)]
        if state.is_terminal:
            raise InvalidRequest(f"reports: got report {report.seq} after 'finished'. Nothing follows it.")
        if batch.rank != 0 and not rule.is_from_any_rank:
            raise InvalidRequest(f"reports: got a {body.kind!r} report of rank {batch.rank}; rank 0 sends these")
        if rule.is_of_training and state is not AttemptState.RUNNING:
            raise InvalidRequest(f"reports: got a {body.kind!r} report before 'started'")
        if isinstance(body, contracts.StartedReport):
            state = next_attempt_state(state, AttemptEvent.STARTED)
        elif isinstance(body, contracts.FinishedReport):
            state = _end(status, batch.rank, state, body)


def _end(status: AttemptStatus, rank: int, state: AttemptState, body: contracts.FinishedReport) -> AttemptState:
    if rank != 0 and body.outcome != "failed":
        raise InvalidRequest(f"reports: rank {rank} reported {body.outcome!r}; only rank 0 can")
    if body.outcome == "cancelled" and status.desired is DesiredState.RUN:
        raise InvalidRequest("reports: got outcome 'cancelled'; nobody asked for that")
    return next_attempt_state(state, ENDINGS[body.outcome])
