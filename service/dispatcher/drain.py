"""Drains the pools of a server that stops: every attempt saves a checkpoint and ends, and its job waits in the queue."""

from octet.api_schemas import DesiredState
from octet.service import store
from octet.service.dispatcher.context import DispatcherContext
from octet.service.jobs import attempts


def step(context: DispatcherContext) -> int:
    """Ask the attempts that nobody stops yet to make way. Return how many attempts have not ended."""
    with context.database.read() as session:
        live = store.queue.live_attempts(session)
    for ref, _ in live:
        with context.write() as (session, now):
            locked = store.jobs.lock_attempt(session, ref.attempt_id)
            if locked is not None and not locked[1].state.is_terminal and locked[0].desired is DesiredState.RUN:
                attempts.make_way(session, locked[0], now, "the server stops")
    return len(live)
