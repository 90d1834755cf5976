"""Strategies for training one model on several ranks. Data parallel in buckets, ZeRO, tensor parallel."""

from worker.parallel.data_parallel import GradientBuckets, broadcast_parameters
from worker.parallel.on_mesh import on_mesh
from worker.parallel.parallelize import WIDE_DTYPES, Parallel
from worker.parallel.scaling import share_scaling

__all__ = ["WIDE_DTYPES", "GradientBuckets", "Parallel", "broadcast_parameters", "on_mesh", "share_scaling"]
