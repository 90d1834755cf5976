"""Runs a rank in this process, from its order as JSON. Importing this loads no torch."""

from datetime import datetime
from typing import Any

from api_schemas import LaunchOrder
from worker.config import RankEnv
from worker.main import run_rank
from worker.warm.process import Ending


def run_order(order_json: str, env: dict[str, Any], placed_at: datetime) -> Ending:
    """Run one rank of an attempt; return its outcome, reason and message, the first two None if it may not report any more."""
    outcome = run_rank(LaunchOrder.model_validate_json(order_json), RankEnv(**env), placed_at)
    finished = outcome.finished
    return (finished.outcome, finished.reason, outcome.message) if finished else (None, None, outcome.message)
