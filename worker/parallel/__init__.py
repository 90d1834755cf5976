"""Strategies for training one model on several ranks. Today: data parallel in buckets, and ZeRO stages 1 and 2."""

from worker.parallel.data_parallel import GradientBuckets, broadcast_parameters
from worker.parallel.parallelize import WIDE_DTYPES, Parallel
from worker.parallel.scaling import share_scaling

__all__ = ["WIDE_DTYPES", "GradientBuckets", "Parallel", "broadcast_parameters", "share_scaling"]
