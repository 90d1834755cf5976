"""Strategies for training one model on several ranks. Today: data parallel, with gradients averaged once per step."""

from worker.parallel.data_parallel import average_gradients, broadcast_parameters
from worker.parallel.scaling import share_scaling

__all__ = ["average_gradients", "broadcast_parameters", "share_scaling"]
