"""Ranks that train one model together. Today: data parallel, with gradients averaged once per step."""

from worker.parallel.data_parallel import average_gradients, broadcast_parameters
from worker.parallel.ranks import Ranks

__all__ = ["Ranks", "average_gradients", "broadcast_parameters"]
