"""Moves comparisons along: keeps the outcomes of children that ended, and queues the next ones or ends the comparison.

Each comparison is one transaction. A dispatcher that dies in between leaves it as it was, and the next one decides the same.
"""

from octet.service import store
from octet.service.dispatcher.context import DispatcherContext
from octet.service.jobs import comparisons
from octet.service.scheduling.advance import advance


def step(context: DispatcherContext) -> None:
    with context.database.read() as session:
        waiting = store.comparisons.to_advance(session)
    context.each(lambda comparison_id: _advance(context, comparison_id), waiting)
    if waiting:
        context.wake()


def _advance(context: DispatcherContext, comparison_id: str) -> None:
    with context.write() as (session, now):
        found = comparisons.record(session, comparison_id)
        if found is None:
            return
        row, spec, outcomes = found
        decided = advance(spec, outcomes)
        if decided.ends is not None:
            comparisons.end(session, row, *decided.ends, now)
        else:
            comparisons.queue_next(session, row, spec, decided.wanted, now)
