"""`on_mesh`: put the converted model of a job on its mesh. `parallelize` does it for loops of one's own."""

import torch
from torch import nn

from octet.api_schemas.layout import ParallelismSpec
from octet.worker.common.deferred import is_deferred
from octet.worker.common.errors import InvalidConfig
from octet.worker.fp8.weight import stored
from octet.worker.mesh import Axes
from octet.worker.parallel.data_parallel import broadcast_parameters
from octet.worker.parallel.parallel import WIDE_DTYPES, Parallel
from octet.worker.parallel.strategies import CannotDivide, divide
from octet.worker.parallel.strategy import replicas_by_tensor
from octet.worker.prepare.convert import share_rounding


def on_mesh(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Axes, parallelism: ParallelismSpec) -> Parallel:
    """Return the model and its optimizer on the mesh. All ranks call it together, with the same whole model.

    Where it has no values yet, `materialize` gives each rank those of its part.

    Raises InvalidConfig for a model that the ranks of an axis cannot divide.
    """
    share_rounding(model, mesh.replicas.rank, mesh.replicas.size)
    try:
        parts = divide(model, optimizer, mesh, sequence=parallelism.sequence)
    except CannotDivide as error:
        raise InvalidConfig(f"parallelism.{error.axis}: {error}") from None
    if not any(map(is_deferred, map(stored, model.parameters()))):  # else `materialize` does it
        apart = replicas_by_tensor(parts)
        broadcast_parameters(model, lambda tensor: apart.get(tensor, mesh.replicas))
    wide_dtype = WIDE_DTYPES[parallelism.wide_communication]
    return Parallel(model, optimizer, mesh, zero_stage=parallelism.zero_stage, wide_dtype=wide_dtype, parts=parts)
