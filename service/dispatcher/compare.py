"""Moves comparisons along: keeps the outcomes of children that ended, and queues the next ones or ends the comparison.

Each comparison is one transaction. A dispatcher that dies in between leaves it as it was, and the next one decides the same.
One that cannot be advanced, as one that a newer version stored, holds up no other: it is logged, counted and tried again later.
"""

import logging

from sqlalchemy.exc import OperationalError

from octet.service import store
from octet.service.dispatcher.context import DispatcherContext, FailedItem, NotLeading
from octet.service.jobs import comparisons
from octet.service.scheduling.advance import advance

LONGEST_BACKOFF_S = 300.0

logger = logging.getLogger(__name__)


def step(context: DispatcherContext) -> None:
    with context.database.read() as session:
        waiting = store.comparisons.to_advance(session, context.database.now(session))
    failed = context.failed_comparisons
    for comparison_id in failed.keys() - set(waiting):
        del failed[comparison_id]
    now_s = context.monotonic()
    due = [each for each in waiting if each not in failed or failed[each].due_s <= now_s]
    errors: dict[str, Exception] = {}
    context.each(lambda comparison_id: _try(context, comparison_id, errors), due)
    for comparison_id in due:
        if comparison_id in errors:
            _put_off(context, comparison_id, errors[comparison_id])
        else:
            failed.pop(comparison_id, None)
    if len(errors) < len(due):
        context.wake()


def _try(context: DispatcherContext, comparison_id: str, errors: dict[str, Exception]) -> None:
    """Advance a comparison, or keep its error. Raises what is no fault of the comparison."""
    try:
        _advance(context, comparison_id)
    except (NotLeading, OperationalError):
        raise
    except Exception as error:  # noqa: BLE001  one comparison holds up no other
        errors[comparison_id] = error


def _put_off(context: DispatcherContext, comparison_id: str, error: Exception) -> None:
    former = context.failed_comparisons.get(comparison_id)
    num_failures = 1 if former is None else former.num_failures + 1
    pause_s = min(LONGEST_BACKOFF_S, 2.0 ** min(num_failures, 10))
    context.failed_comparisons[comparison_id] = FailedItem(num_failures, context.monotonic() + pause_s)
    context.health.item_failed()
    logger.error(
        "comparison %s cannot go on, %d in a row; it is tried again in %g s",
        comparison_id,
        num_failures,
        pause_s,
        exc_info=error,
    )


def _advance(context: DispatcherContext, comparison_id: str) -> None:
    with context.write() as (session, now):
        found = comparisons.record(session, comparison_id)
        if found is None:
            return
        row, spec, outcomes = found
        decided = advance(spec, outcomes, store.comparisons.slot_hours(session, comparison_id, now))
        if decided.ends is not None:
            comparisons.end(session, row, *decided.ends, now)
        else:
            comparisons.queue_next(session, row, spec, decided.wanted, now)
