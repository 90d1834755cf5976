"""Strategies for training one model on several ranks: data parallel in buckets, ZeRO, tensor, sequence, context, pipeline."""

from octet.worker.parallel.data_parallel import GradientBuckets, broadcast_parameters
from octet.worker.parallel.on_mesh import on_mesh
from octet.worker.parallel.parallel import WIDE_DTYPES, Parallel

__all__ = ["WIDE_DTYPES", "GradientBuckets", "Parallel", "broadcast_parameters", "on_mesh"]
