"""Runs a rank in this process, from its order as JSON. Importing this loads no torch."""

from datetime import datetime
from typing import Any

from octet.api_schemas import LaunchOrder
from octet.worker.common.config import RankEnv
from octet.worker.rank.main import run_rank
from octet.worker.rank.warm.process import Ending
from octet.worker.rank.warm.user import NotThatUser, become


def run_order(order_json: str, env: dict[str, Any], placed_at: datetime, *, is_forked: bool = False) -> Ending:
    """Run one rank of an attempt; return its outcome, reason and message, the first two None if it may not report any more.

    is_forked: this process was forked for the rank, so it can become another user.
    """
    order = LaunchOrder.model_validate_json(order_json)
    if order.user is not None:
        try:
            if not is_forked:
                raise NotThatUser(
                    "ranks of a user of their own need a process that was forked for them; the node's log says why"
                )
            become(order, order.user)
        except NotThatUser as error:
            return "failed", error.reason, str(error)
    outcome = run_rank(order, RankEnv(**env), placed_at)
    finished = outcome.finished
    return (finished.outcome, finished.reason, outcome.message) if finished else (None, None, outcome.message)
