"""The axes on which ranks train one model: those of a job, or of the process group of somebody's own program."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self, get_args

import torch
import torch.distributed as dist

from octet.api_schemas import AxisName, Layout
from octet.api_schemas.nccl_buffers import NUM_EXCHANGE_CHANNELS
from octet.worker.kernels.torch_private import timeout_of_world
from octet.worker.mesh.axis import Axis


class Axes:
    """Every axis of a layout through one rank, as `axes.tensor` or `axes["tensor"]`.

    world: all ranks; they stop together. pipeline: ranks that hold consecutive layers. data: ranks that train the same layers
    on different sequences. context: on different tokens of the same sequences. replicas: both; these ranks average gradients.
    tensor: ranks that share each layer. stage: replicas and tensor together; these ranks agree on the state of FP8 scaling.
    expert: replicas that each hold some experts of a mixture. expert_replicas: those that hold the same experts.
    """

    layout: Layout
    world: Axis
    pipeline: Axis
    data: Axis
    context: Axis
    replicas: Axis
    tensor: Axis
    stage: Axis
    expert: Axis
    expert_replicas: Axis

    def __init__(self, layout: Layout, by_name: Mapping[AxisName, Axis]) -> None:
        self.set_axes(layout, by_name)

    def set_axes(self, layout: Layout, by_name: Mapping[AxisName, Axis]) -> None:
        """Take these axes, one for each name."""
        self.layout = layout
        vars(self).update({str(name): axis for name, axis in by_name.items()})

    def __getitem__(self, name: AxisName) -> Axis:
        axis: Axis = vars(self)[name]
        return axis

    def counters(self) -> list[Counter[Any]]:
        """Return what this rank counts of its collectives. The replay of recorded ones, which runs no Python, adds to these."""
        axes = {self[name] for name in get_args(AxisName)}
        return [axis.sent_bytes for axis in axes] + [waits.num_started for waits in {axis.waits for axis in axes}]

    @classmethod
    def of_data(cls, data: Axis, others: Mapping[AxisName, Axis] | None = None) -> Self:
        """Return the axes of ranks that all train on different samples. others: axes of other ranks, by name."""
        alone: dict[AxisName, Axis] = {name: Axis(name, 1, 0, data.device) for name in get_args(AxisName)}
        same: dict[AxisName, Axis] = dict.fromkeys(("world", "data", "replicas", "stage", "expert_replicas"), data)
        return cls(Layout(data.size), alone | same | dict(others or {}))

    @classmethod
    def of_layout(cls, layout: Layout, rank: int, device: torch.device) -> Self:
        """Return the axes of a layout through a rank of the whole world, whose ranks all call it together."""
        return cls(layout, make_axes(layout, rank, device))

    @classmethod
    def of_group(
        cls, device: torch.device, group: dist.ProcessGroup | None = None, *, stages_per_rank: int = 1, **degrees: int
    ) -> Self:
        """Return the axes of the group's ranks, or of a single process without one. degrees: of a `Layout`, by name.

        Raises ValueError for degrees that do not divide the world, or that were given together with a group.
        """
        is_ready = dist.is_available() and dist.is_initialized()
        size, rank = (dist.get_world_size(group), dist.get_rank(group)) if is_ready else (1, 0)
        degrees = {name: degree for name, degree in degrees.items() if degree != 1}
        if not degrees:
            return cls.of_data(Axis("data", size, rank, device, group))
        if min(degrees.values()) < 1 or size % math.prod(degrees.values()) or group is not None:
            with_group = "" if group is None else " and a group was given"
            named = " · ".join(f"{name} {degree}" for name, degree in degrees.items())
            raise ValueError(
                f"got {named} with {size} ranks{with_group}; allowed: 1, or a divisor of the ranks of the whole world. Change "
                "the degrees, start more ranks, or leave group out."
            )
        return cls.of_layout(Layout(size, stages_per_rank=stages_per_rank, **degrees), rank, device)


def make_axes(layout: Layout, rank: int, device: torch.device) -> dict[AxisName, Axis]:
    """Return every axis of a layout through a rank. All ranks make them together, in the order of their names."""
    made: dict[AxisName, Axis] = {}
    for name in get_args(AxisName):
        if name == "replicas" and layout.context == 1:
            made[name] = made["data"]
        elif name == "expert_replicas" and layout.expert == 1:
            made[name] = made["replicas"]
        else:
            made[name] = make_axis(layout, name, rank, device)
    return made


def make_axis(layout: Layout, name: AxisName, rank: int, device: torch.device) -> Axis:
    """Return the axis through a rank. torch requires that every rank creates every group; the whole world needs none."""
    ranks, group = layout.group(name, rank), None
    if 1 < len(ranks) < layout.num_ranks:
        made = {members: _new_group(list(members)) for members in layout.groups(name)}
        group = made[ranks]
    return Axis(name, len(ranks), ranks.index(rank), device, group)


def twin_of(axis: Axis) -> Axis:
    """Return an axis of the same ranks with a communicator of its own. All ranks of the world call it together, each for its
    own axis: where groups connect when they are made, NCCL splits the world's communicator, once for all of them.

    Its collectives need no common order with those of the first axis, in whose counts its bytes and waits appear.
    """
    if axis.size == 1:
        return axis
    group = _new_group(dist.get_process_group_ranks(axis.group), use_local_synchronization=True)
    twin = Axis(axis.name, axis.size, axis.rank, axis.device, group)
    twin.sent_bytes, twin.waits = axis.sent_bytes, axis.waits
    return twin


def bound_exchange(axis: Axis) -> None:
    """Let an axis exchange over a communicator of its own with few channels, where NCCL is the backend. All ranks of the world
    call it together, each for its own axis.

    The buffers of an exchange grow with its channels (`api_schemas/nccl_buffers.py`), not with how it is divided into sends.
    """
    if axis.size == 1 or axis.exchange_group is not None or "nccl" not in dist.get_backend(axis.group):
        return
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = NUM_EXCHANGE_CHANNELS
    ranks = dist.get_process_group_ranks(axis.group)
    axis.exchange_group = _new_group(ranks, backend="nccl", pg_options=options, use_local_synchronization=True)


def _new_group(ranks: list[int], **options: Any) -> Any:
    """Make a group whose collectives wait as long as the world's. torch would give it its own default, 10 or 30 minutes."""
    return dist.new_group(ranks, timeout=timeout_of_world(), **options)
