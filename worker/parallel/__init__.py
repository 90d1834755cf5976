"""Strategies for training one model on several ranks. Today: data parallel in buckets, and ZeRO stage 1."""

from worker.parallel.data_parallel import GradientBuckets, broadcast_parameters
from worker.parallel.parallelize import Parallel
from worker.parallel.scaling import share_scaling

__all__ = ["GradientBuckets", "Parallel", "broadcast_parameters", "share_scaling"]
