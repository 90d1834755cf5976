"""Submit, pause, resume, cancel and advance comparisons. Each is one transaction, which the caller opens."""

import json
import logging
from collections.abc import Callable, Container, Sequence
from datetime import datetime
from functools import lru_cache

from pydantic import ValidationError
from sqlalchemy.orm import Session

from octet.api_schemas import JobState, JobSummary
from octet.api_schemas.comparison import (
    NOISE,
    Child,
    Comparison,
    ComparisonSpec,
    ComparisonState,
    EvaluatedPoint,
    Outcome,
    outcome_of,
)
from octet.api_schemas.comparison_report import ComparisonDetails, ComparisonReport, Outcomes, Question, report_of
from octet.service import store
from octet.service.db.tables import ComparisonChildRow, ComparisonRow, JobRow
from octet.service.errors import IdempotencyMismatch, IllegalTransition, NotFound
from octet.service.jobs import commands
from octet.service.jobs.requests import Request, body_hash_of
from octet.service.store.comparisons import ChildState, ChildSummary
from octet.service.store.ids import is_id, new_id
from octet.service.store.jobs import TakenKey

MOST_REPORTS = 16
_unreadable: set[str] = set()
"""The comparisons that are logged as unreadable."""
_WHOLE_CURVE = 2**53
_reports: dict[tuple[str, frozenset[ChildSummary]], ComparisonReport] = {}
"""The last reports, by comparison and the children that have outcomes: one of 32 arms and 30 seeds takes 0.7 s."""

logger = logging.getLogger(__name__)


def submit(
    session: Session,
    spec: ComparisonSpec,
    sent: bytes,
    key: str | None,
    tenant: str,
    now: datetime,
    traceparent: str | None = None,
) -> tuple[ComparisonRow, bool]:
    """Store a comparison, or find the one that the tenant used this key for; returns True with the latter.

    traceparent: the span of the request, which its jobs keep. Raises IdempotencyMismatch if the key was used for something
    else.
    """
    comparison_id, body_hash = new_id("cmp", now), body_hash_of(sent)
    if key is not None:
        taken = TakenKey(tenant, key, body_hash, comparison_id, now + store.jobs.IDEMPOTENCY_KEPT)
        if not store.jobs.take_idempotency_keys(session, [taken], now):
            return _earlier(session, spec, body_hash, key, tenant, now), True
    row = ComparisonRow(
        id=comparison_id,
        name=spec.job.name,
        tenant=tenant,
        state=ComparisonState.RUNNING,
        spec=spec.model_dump(mode="json", exclude_unset=True) | {"at_once": spec.at_once},
        queues_more=True,
        created_at=now,
        traceparent=traceparent,
    )
    session.add(row)
    return row, False


def is_replay(session: Session, spec: ComparisonSpec, sent: bytes, key: str, tenant: str, now: datetime) -> bool:
    """Return True if the key was used for this comparison. Raises IdempotencyMismatch if it was used for something else."""
    if store.jobs.find_idempotency_key(session, tenant, key, now) is None:
        return False
    return _earlier(session, spec, body_hash_of(sent), key, tenant, now) is not None


@lru_cache(maxsize=256)
def _parsed(text: str) -> ComparisonSpec:
    """Parse a stored comparison, which checks the job of each arm, once for many answers."""
    return ComparisonSpec.read_stored(json.loads(text))


def _spec_of(row: ComparisonRow) -> ComparisonSpec:
    return _parsed(json.dumps(row.spec))


def _earlier(session: Session, spec: ComparisonSpec, body_hash: str, key: str, tenant: str, now: datetime) -> ComparisonRow:
    used = store.jobs.find_idempotency_key(session, tenant, key, now)
    assert used is not None, "a key that is taken is there"
    row = store.comparisons.find(session, used.job_id)
    if row is None and is_id("cmp", used.job_id):
        raise IdempotencyMismatch(f"Idempotency-Key {key!r} was used for {used.job_id}, which is deleted. Use a new key.")
    if row is None or (used.body_hash != body_hash and _spec_of(row) != spec):
        message = f"Idempotency-Key {key!r} was used for another request, {used.job_id}. Use a new key for a new comparison."
        raise IdempotencyMismatch(message)
    return row


def pause(session: Session, comparison_id: str, now: datetime, tenant: str | None) -> ComparisonRow:
    """Pause a comparison and all of its children that are not over. A second call changes nothing.

    Raises NotFound, and IllegalTransition once it is over.
    """
    row = _lock(session, comparison_id, tenant, "pause")
    row.state = ComparisonState.PAUSED
    states = {JobState.CANCELLING, JobState.PAUSING, JobState.PAUSED}
    _do_to_children(session, comparison_id, lambda job_id: commands.pause(session, job_id, now), states)
    return row


def resume(session: Session, comparison_id: str, now: datetime, tenant: str | None) -> ComparisonRow:
    """Let a paused comparison go on, with all of its paused children.

    Raises NotFound, and IllegalTransition once it is over and while workers of a child still end.
    """
    row = _lock(session, comparison_id, tenant, "resume")
    if row.state is ComparisonState.PAUSED:
        row.state = ComparisonState.RUNNING
        _do_to_children(session, comparison_id, lambda job_id: commands.resume(session, job_id, now), {JobState.CANCELLING})
    return row


def cancel(session: Session, comparison_id: str, now: datetime, tenant: str | None, *, saves: bool = False) -> ComparisonRow:
    """Cancel a comparison and all of its children that are not over.

    saves: children that train save a checkpoint first. Raises NotFound, and IllegalTransition once it is over.
    """
    row = _lock(session, comparison_id, tenant, "cancel")
    _record(session, row)
    _cancel_children(session, comparison_id, now, saves=saves)
    store.comparisons.end(row, ComparisonState.CANCELLED, "somebody cancelled it", now)
    return row


def delete(session: Session, comparison_id: str, tenant: str | None) -> None:
    """Delete a comparison that is over, with its report; its jobs stay. Raises NotFound, and IllegalTransition until then."""
    row = _find(session, comparison_id, tenant)
    if not row.state.is_terminal:
        raise IllegalTransition(f"the comparison is {row.state.value}; delete is not possible. Cancel it first.")
    store.comparisons.delete(session, row)
    logger.info("comparison %s (%s) is deleted", row.id, row.name)


def record(session: Session, comparison_id: str) -> tuple[ComparisonRow, ComparisonSpec, Outcomes] | None:
    """Lock a running comparison and keep the outcomes of its children that are over. None if it does not run any more."""
    row = store.comparisons.lock(session, comparison_id)
    if row is None or row.state is not ComparisonState.RUNNING:
        return None
    _record(session, row)
    return row, _spec_of(row), outcomes_of(session, comparison_id, has_points=False)


def end(session: Session, row: ComparisonRow, state: ComparisonState, message: str, now: datetime) -> None:
    """End a comparison, and cancel the children that nothing depends on any more."""
    store.comparisons.end(row, state, message, now)
    logger.info("comparison %s (%s) is %s: %s", row.id, row.name, state.value, message)
    _cancel_children(session, row.id, now, saves=False)


def queue_next(
    session: Session, row: ComparisonRow, spec: ComparisonSpec, wanted: Sequence[tuple[int, int]], now: datetime
) -> None:
    """Queue the first of the wanted children, by arm and seed, that are not there, as long as few enough are alive.

    Children that nothing depends on any more are cancelled: those of an arm that has its answer.
    """
    _cancel_children(session, row.id, now, saves=False, but=wanted)
    present = {(child.arm, child.seed) for child in store.comparisons.children_of(session, row.id)}
    num_alive = sum(child.is_alive for child in store.comparisons.without_outcome(session, row.id))
    missing = [child for child in wanted if child not in present]
    chosen = missing[: max(0, spec.at_once - num_alive)]
    requests = [Request(spec.child(arm, seed, row.id), tenant=row.tenant, traceparent=row.traceparent) for arm, seed in chosen]
    submissions = commands.submit_all(session, requests, now, store.jobs.newest_job(session).id) if requests else []
    for (arm, seed), submission in zip(chosen, submissions, strict=True):
        assert not isinstance(submission, IdempotencyMismatch), "a child has no key"
        session.add(ComparisonChildRow(comparison_id=row.id, arm=arm, seed=seed, job_id=submission.job.id))
    row.queues_more = len(missing) > len(chosen)


def outcomes_of(session: Session, comparison_id: str, *, has_points: bool) -> Outcomes:
    """Read the outcomes of children, by arm and seed. has_points: with their evaluations, which only a report shows."""
    found = store.comparisons.outcomes_of(session, comparison_id, has_points=has_points)
    return {(arm, seed): Outcome.read_stored(outcome) for arm, seed, outcome in found}


def shown(row: ComparisonRow) -> Comparison:
    """Show a comparison as lists do."""
    return Comparison(
        id=row.id,
        name=row.name,
        tenant=row.tenant,
        state=row.state,
        message=row.message,
        created_at=row.created_at,
        finished_at=row.finished_at,
        spec=_spec_of(row),
    )


def readable(rows: Sequence[ComparisonRow]) -> list[Comparison]:
    """Show the comparisons of a list. One that another version stored and this one cannot read is left out, and logged once."""
    found = []
    for row in rows:
        try:
            found.append(shown(row))
        except ValidationError as error:
            if row.id not in _unreadable:
                _unreadable.add(row.id)
                logger.error("comparison %s cannot be read by this version; lists leave it out: %s", row.id, error)
    return found


def details(session: Session, row: ComparisonRow) -> ComparisonDetails:
    """Show a comparison with its children and what they show so far."""
    shown_row = shown(row)
    question = Question.of(shown_row.spec)
    found = store.comparisons.children_of(session, row.id)
    children = tuple(
        Child(
            job_id=child.job_id,
            arm=(shown_row.spec.noise if child.arm == NOISE else question.arms[child.arm]).name,
            seed=child.seed,
            state=child.state,
            outcome=child.kind,
        )
        for child in found
    )
    report = _report(session, row.id, question, frozenset(child for child in found if child.kind is not None))
    return ComparisonDetails(**dict(shown_row), children=children, report=report)


def _report(session: Session, comparison_id: str, question: Question, known: frozenset[ChildSummary]) -> ComparisonReport:
    """Report a comparison. A report holds until a child ends, or ends again after a retry; clients ask each second."""
    key = (comparison_id, known)
    report = _reports.get(key) or report_of(question, outcomes_of(session, comparison_id, has_points=True))
    _reports[key] = report
    if len(_reports) > MOST_REPORTS:
        _reports.pop(next(iter(_reports)), None)
    return report


def _find(session: Session, comparison_id: str, tenant: str | None) -> ComparisonRow:
    row = store.comparisons.lock(session, comparison_id)
    if row is None or tenant not in (None, row.tenant):
        raise NotFound(f"there is no comparison {comparison_id}")
    return row


def _lock(session: Session, comparison_id: str, tenant: str | None, verb: str) -> ComparisonRow:
    row = _find(session, comparison_id, tenant)
    if row.state.is_terminal:
        raise IllegalTransition(f"the comparison is {row.state.value}; {verb} is not possible. Submit it again.")
    return row


def _do_to_children(
    session: Session,
    comparison_id: str,
    do: Callable[[str], JobRow],
    states: Container[JobState] = (),
    but: Container[tuple[int, int]] = (),
) -> None:
    """Do something to the children that are not over, in the order of their ids. states, but: those to leave."""
    for child, _ in store.comparisons.without_outcome(session, comparison_id):
        if (child.arm, child.seed) in but:
            continue
        job = store.jobs.lock_job(session, child.job_id)
        if job is not None and not job.state.is_terminal and job.state not in states:
            do(job.id)


def _cancel_children(
    session: Session, comparison_id: str, now: datetime, *, saves: bool, but: Container[tuple[int, int]] = ()
) -> None:
    _do_to_children(session, comparison_id, lambda job_id: commands.cancel(session, job_id, now, saves=saves), but=but)


def _record(session: Session, row: ComparisonRow) -> None:
    """Keep the outcomes of children that are over."""
    for child in store.comparisons.without_outcome(session, row.id):
        if not child.is_alive:
            # A retry locks the job too, so it either comes first and is seen, or forgets this outcome.
            job = store.jobs.lock_job(session, child.child.job_id)
            if job is not None and not job.state.is_terminal:
                continue
            child.child.outcome = json.loads(_outcome(session, child).model_dump_json())
    session.flush()


def _outcome(session: Session, child: ChildState) -> Outcome:
    job = child.job
    if job is None:
        return outcome_of(None, None, None, None, ())
    evaluations = store.curves.evaluations_between(session, job.id, 0, _WHOLE_CURVE)
    points = [EvaluatedPoint(step=each.step, loss=each.loss, metrics=dict(each.metrics)) for each in evaluations]
    summary = JobSummary.read_stored(job.summary) if job.summary else None
    return outcome_of(job.state, summary, job.reason, job.message, points)
