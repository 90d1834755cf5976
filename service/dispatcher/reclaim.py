"""Takes lent slots back: attempts on them save a checkpoint and end once the job ahead fits with what is free and what is lent.

A loan ends by itself when no job waits ahead any more: the attempt keeps its slots then, as any other.
"""

from octet.api_schemas import DesiredState
from octet.service import store
from octet.service.dispatcher.context import DispatcherContext
from octet.service.dispatcher.place import decisions
from octet.service.jobs import attempts
from octet.service.scheduling.decide import to_reclaim
from octet.service.store.queue import Loan


def step(context: DispatcherContext) -> None:
    with context.database.read() as session:
        loans = store.queue.loans(session)
        if not loans:
            return
        decided = decisions(context, session, context.database.now(session))
    ahead = {each.pool: each for each in decided if each.holds_back}
    for pool in {loan.pool for loan in loans}:
        if pool not in ahead:
            with context.write() as (session, _):
                store.queue.end_loans(session, pool)
            continue
        for loan in to_reclaim([loan for loan in loans if loan.pool == pool], ahead[pool].short):
            _reclaim(context, loan)


def _reclaim(context: DispatcherContext, loan: Loan) -> None:
    with context.write() as (session, now):
        locked = store.jobs.lock_attempt(session, loan.attempt_id)
        if locked is None or locked[1].state.is_terminal or locked[0].desired is not DesiredState.RUN:
            return
        attempts.make_way(session, locked[0], now, "the job ahead of it can use the slots that it was lent")
    context.wake()
