"""Runs a rank in this process, from its order as JSON. Importing this loads no torch."""

from datetime import datetime
from typing import Any

from octet.api_schemas import LaunchOrder
from octet.worker.common.config import RankEnv
from octet.worker.rank.main import run_rank
from octet.worker.rank.warm.process import Ending


def run_order(order_json: str, env: dict[str, Any], placed_at: datetime) -> Ending:
    """Run one rank of an attempt; return its outcome, reason and message, the first two None if it may not report any more."""
    outcome = run_rank(LaunchOrder.model_validate_json(order_json), RankEnv(**env), placed_at)
    finished = outcome.finished
    return (finished.outcome, finished.reason, outcome.message) if finished else (None, None, outcome.message)
