"""Put a converted model on the mesh of a job: stages over the pipeline axis, shards of these over the tensor axis.

Then gradients, and pieces, are put on the data axis.
"""

from typing import Any

import torch
from torch import nn

from api_schemas.resources import ParallelismSpec
from worker.deferred import is_deferred
from worker.errors import InvalidConfig
from worker.mesh import Mesh
from worker.models.context import divide_sequences
from worker.parallel.axes import Axes
from worker.parallel.data_parallel import broadcast_parameters
from worker.parallel.parallelize import WIDE_DTYPES, Parallel
from worker.parallel.plans import Plan, check_heads, held_part, plan_of
from worker.parallel.stages import Stages, split
from worker.parallel.staging import staging_of
from worker.parallel.tensor import TensorShards, cut_model
from worker.prepare import share_rounding


def on_mesh(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, parallelism: ParallelismSpec) -> Parallel:
    """Return the model and its optimizer on the mesh. All ranks call it together, with the same whole model.

    Where it has no values yet, `materialize` gives each rank those of its part.

    Raises InvalidConfig for a model that the tensor or the context axis cannot divide.
    """
    share_rounding(model, mesh.replicas.rank, mesh.replicas.size)
    try:
        divide_sequences(model, mesh.context)
    except ValueError as error:
        raise InvalidConfig(f"parallelism.context: {error}") from None
    try:
        plan = plan_of(model) if mesh.tensor.size > 1 else {}
        check_heads(model, mesh.tensor.size)
    except ValueError as error:
        raise InvalidConfig(f"parallelism.tensor: {error}") from None
    options: dict[str, Any] = {
        "zero_stage": parallelism.zero_stage,
        "wide_dtype": WIDE_DTYPES[parallelism.wide_communication],
    }
    axes = Axes.of_mesh(mesh)
    if mesh.pipeline.size > 1:
        from worker.parallel.staged import StagedParallel  # loads torch's pipelining, a second of a rank's start

        stages = split(staging_of(model), optimizer, mesh.layout, mesh.pipeline)
        shards = _cut(model, optimizer, mesh, held_part(plan, model), parallelism, stages)
        return StagedParallel(model, optimizer, axes, stages, shards=shards, **options)
    shards = _cut(model, optimizer, mesh, plan, parallelism)
    return Parallel(model, optimizer, axes, shards=shards, **options)


def _cut(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    plan: Plan,
    parallelism: ParallelismSpec,
    stages: Stages | None = None,
) -> TensorShards:
    """Let this rank hold its shards of what its stages have left of the model, alike on all ranks that hold the same."""
    whole, parts = list(model.parameters()), [] if stages is None else list(stages.parts.values())
    try:
        shards = cut_model(model, optimizer, Axes.of_mesh(mesh), plan, sequence=parallelism.sequence, parts=parts)
    except ValueError as error:
        raise InvalidConfig(f"parallelism.tensor: {error}") from None
    if stages is not None:
        stages.follow(dict(zip(whole, model.parameters(), strict=True)))
    if not any(map(is_deferred, model.parameters())):  # else `materialize` does it
        broadcast_parameters(model, mesh.replicas)
    return shards
