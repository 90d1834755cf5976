"""The axes on which one model is trained: those of a job's mesh, or of the process group of somebody's own program."""

from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from api_schemas import AxisName, Layout
from worker.mesh import Axis, Mesh, make_axis


class Axes(NamedTuple):
    """The ranks that train one model, or one stage of it.

    data: ranks that train on different samples. context: ranks that divide the tokens of the same samples. replicas: both; they
    average gradients. tensor: ranks that divide layers. stage: all of these; they agree on FP8 scaling. pipeline: ranks that
    hold the stages of the model. world: all ranks.
    """

    replicas: Axis
    tensor: Axis
    stage: Axis
    data: Axis
    context: Axis
    pipeline: Axis
    world: Axis

    @classmethod
    def of_data(cls, data: Axis) -> Self:
        """Ranks that all train on different samples."""
        tensor, context, pipeline = (Axis(name, 1, 0, data.device) for name in ("tensor", "context", "pipeline"))
        return cls(data, tensor, data, data, context, pipeline, data)

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> Self:
        """The axes of a job's mesh."""
        return cls(mesh.replicas, mesh.tensor, mesh.stage, mesh.data, mesh.context, mesh.pipeline, mesh.world)

    @classmethod
    def of_layout(cls, layout: Layout, rank: int, device: torch.device) -> Self:
        """The axes of a layout through a rank of the whole world, whose ranks all call it together."""
        names: tuple[AxisName, ...] = ("data", "tensor", "stage", "context", "pipeline", "world")
        data, tensor, stage, context, pipeline, world = (make_axis(layout, name, rank, device) for name in names)
        replicas = data if context.size == 1 else make_axis(layout, "replicas", rank, device)
        return cls(replicas, tensor, stage, data, context, pipeline, world)


def axes_of(tensor: int, device: torch.device, group: dist.ProcessGroup | None, context: int = 1, pipeline: int = 1) -> Axes:
    """Return the axes of the group's ranks, or of a single process without one.

    Raises ValueError for degrees that do not divide the world, or that were given together with a group.
    """
    is_ready = dist.is_available() and dist.is_initialized()
    size, rank = (dist.get_world_size(group), dist.get_rank(group)) if is_ready else (1, 0)
    degrees = {"tensor": tensor, "context": context, "pipeline": pipeline}
    if tensor == context == pipeline == 1:
        return Axes.of_data(Axis("data", size, rank, device, group))
    if min(degrees.values()) < 1 or size % (tensor * context * pipeline) or group is not None:
        given = "" if group is None else " and a group was given"
        named = " · ".join(f"{name} {degree}" for name, degree in degrees.items() if degree != 1)
        raise ValueError(
            f"got {named} with {size} ranks{given}; allowed: 1, or a divisor of the ranks of the whole world. Change "
            "the degrees, start more ranks, or leave group out."
        )
    return Axes.of_layout(Layout(size, tensor, pipeline, context), rank, device)
