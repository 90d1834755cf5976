"""Put a converted model on the mesh of a job: shards over the tensor axis, or stages over the pipeline axis.

Then gradients, and pieces, are put on the data axis.
"""

import torch
from torch import nn

from api_schemas.resources import ParallelismSpec
from worker.errors import InvalidConfig
from worker.mesh import Mesh
from worker.models.context import divide_sequences
from worker.optim import LowBitOptimizer
from worker.parallel.axes import Axes
from worker.parallel.data_parallel import broadcast_parameters
from worker.parallel.parallelize import WIDE_DTYPES, Parallel
from worker.parallel.plans import check_heads, plan_of
from worker.parallel.stages import split
from worker.parallel.tensor import cut_model
from worker.prepare import share_rounding


def on_mesh(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, parallelism: ParallelismSpec) -> Parallel:
    """Return the model and its optimizer on the mesh. All ranks call it together, with the same whole model.

    Raises InvalidConfig for a model that the tensor or the context axis cannot divide.
    """
    share_rounding(model, mesh.replicas.rank, mesh.replicas.size)
    axes = Axes.of_mesh(mesh)
    try:
        divide_sequences(model, mesh.context)
    except ValueError as error:
        raise InvalidConfig(f"parallelism.context: {error}") from None
    try:
        plan = plan_of(model) if mesh.tensor.size > 1 else {}
        check_heads(model, mesh.tensor.size)
        shards = cut_model(model, optimizer, axes, plan, sequence=parallelism.sequence)
    except ValueError as error:
        raise InvalidConfig(f"parallelism.tensor: {error}") from None
    broadcast_parameters(model, mesh.replicas)
    stage, wide_dtype = parallelism.zero_stage, WIDE_DTYPES[parallelism.wide_communication]
    if mesh.pipeline.size > 1:
        from worker.parallel.staged import StagedParallel  # loads torch's pipelining, a second of a rank's start

        assert isinstance(optimizer, LowBitOptimizer)  # that of every job after `prepare`
        stages = split(model, optimizer, mesh.layout, mesh.pipeline)
        return StagedParallel(model, optimizer, mesh, stages, stage, wide_dtype)
    return Parallel(model, optimizer, axes, zero_stage=stage, wide_dtype=wide_dtype, shards=shards)
