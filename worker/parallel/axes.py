"""The axes on which one model is trained: those of a job's mesh, or of the process group of somebody's own program."""

from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from api_schemas import AxisName, Layout
from worker.mesh import Axis, Mesh, make_axis


class Axes(NamedTuple):
    """data: ranks that train on different tokens. tensor: ranks that divide layers. stage: both; they agree on FP8 scaling."""

    data: Axis
    tensor: Axis
    stage: Axis

    @classmethod
    def of_data(cls, data: Axis) -> Self:
        """Ranks that all train on different samples."""
        return cls(data, Axis("tensor", 1, 0, data.device), data)

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> Self:
        """The axes of a job's mesh."""
        return cls(mesh.replicas, mesh.tensor, mesh.stage)


def axes_of(tensor: int, device: torch.device, group: dist.ProcessGroup | None) -> Axes:
    """Return the axes of the group's ranks, or of a single process without one.

    Raises ValueError for a tensor degree that does not divide the world, or that was given together with a group.
    """
    is_ready = dist.is_available() and dist.is_initialized()
    size, rank = (dist.get_world_size(group), dist.get_rank(group)) if is_ready else (1, 0)
    if tensor == 1:
        return Axes.of_data(Axis("data", size, rank, device, group))
    if tensor < 1 or size % tensor or group is not None:
        given = "" if group is None else " and a group was given"
        raise ValueError(
            f"tensor is {tensor} with {size} ranks{given}; allowed: 1, or a divisor of the ranks of the whole world. Change "
            "tensor, start more ranks, or leave group out."
        )
    layout = Layout(size, tensor)
    names: tuple[AxisName, ...] = ("data", "tensor", "stage")
    return Axes(*(make_axis(layout, name, rank, device) for name in names))
