"""Applies heartbeats and steps, which are nearly all that ranks report, for many attempts with a few statements.

Only batches about which there is nothing to decide are applied here: the attempt trains or starts and was heard before, the
token and the epoch are right, no report is missing or comes twice, and the steps continue the curve. For them the result is
that of `reports.apply`, which decides about all others.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import lt
from typing import Any

from api_schemas import AttemptState, ReportBatch, StepReport
from service import store
from service.db.bulk import RowTransaction
from service.jobs.reports import Applied, is_hash_of, progress
from service.jobs.step_batches import StepBatch
from service.store.curves import part_of
from service.store.reporting import Standing, Steps

_HEARD_BEFORE = {AttemptState.STARTING, AttemptState.RUNNING}


@dataclass(frozen=True)
class SentBatch:
    """One request of a rank."""

    attempt_id: str
    token: str
    batch: ReportBatch | StepBatch


def apply_usual(
    transaction: RowTransaction, together: Sequence[SentBatch], lease_s: float, clock: Callable[[datetime | None], datetime]
) -> dict[int, Applied]:
    """Apply the usual batches and renew their leases; returns what each did, by its number. The jobs must be locked.

    clock: tells the time, given what PostgreSQL said in a statement.
    """
    num_batches = Counter(sent.attempt_id for sent in together)
    by_rank: dict[int, dict[str, int]] = {}
    for number, sent in enumerate(together):
        if num_batches[sent.attempt_id] == 1 and may_be_usual(sent.batch):
            by_rank.setdefault(sent.batch.rank, {})[sent.attempt_id] = number
    applied: dict[int, Applied] = {}
    for rank, numbers in by_rank.items():
        standings = store.reporting.standings(transaction, list(numbers), rank)
        usual = {number: standings[id_] for id_, number in numbers.items() if id_ in standings}
        usual = {number: standing for number, standing in usual.items() if _is_usual(together[number], standing)}
        if usual:
            now = clock(next(iter(usual.values())).told)
            until = now + timedelta(seconds=lease_s)
            beats = [standing.attempt_id for number, standing in usual.items() if not together[number].batch.reports]
            if beats:
                store.reporting.note_heartbeats(transaction, beats, now, until if rank == 0 else None)
            if len(beats) < len(usual):
                batches = [(standing, together[number].batch) for number, standing in usual.items()]
                _write_steps(transaction, [pair for pair in batches if pair[1].reports], now, until)
        for number, standing in usual.items():
            reports = together[number].batch.reports
            acknowledged = reports[-1].seq if reports else standing.last_seq
            applied[number] = Applied(standing.desired, lease_s, acknowledged)
    return applied


def may_be_usual(batch: ReportBatch | StepBatch) -> bool:
    """Return True for a heartbeat, and for steps of rank 0."""
    if not batch.reports:
        return True
    return batch.rank == 0 and (
        isinstance(batch, StepBatch) or all(type(report.body) is StepReport for report in batch.reports)
    )


def _is_usual(sent: SentBatch, standing: Standing) -> bool:
    batch = sent.batch
    return (
        is_hash_of(standing.token_hash, sent.token)
        and batch.rank < standing.workers
        and batch.epoch == standing.epoch
        and standing.state in _HEARD_BEFORE
        and standing.has_reported
        and (not batch.reports or standing.state is AttemptState.RUNNING)
        and [report.seq for report in batch.reports]
        == list(range(standing.last_seq + 1, standing.last_seq + 1 + len(batch.reports)))
        and _rise_from(standing.last_step, [step.step for step in _steps(batch)])
    )


def _steps(batch: ReportBatch | StepBatch) -> list[Any]:
    """Return the steps of a usual batch, as `StepReport` or `SentStep`."""
    return [report.body for report in batch.reports]


def _rise_from(last: int, steps: Sequence[int]) -> bool:
    return not steps or (steps[0] > last and all(map(lt, steps, steps[1:])))


def _write_steps(
    transaction: RowTransaction, batches: Sequence[tuple[Standing, ReportBatch | StepBatch]], now: datetime, until: datetime
) -> None:
    """Write the batches of rank 0 that have steps. until: the end of the attempts' leases."""
    rows = Steps()
    for standing, batch in batches:
        moments, steps = [report.at for report in batch.reports], _steps(batch)
        rows.attempts.append((standing.attempt_id, steps[-1].step, now, now, until))
        # In the order of the columns of `store.reporting.note_steps`.
        rows.jobs.append((standing.job_id, *progress(steps[-1], standing.num_steps).values(), now))
        rows.sequences.append((standing.attempt_id, batch.rank, batch.reports[-1].seq))
        rows.parts.append(part_of(standing.job_id, standing.attempt_id, moments, steps))
    store.reporting.note_steps(transaction, rows)
