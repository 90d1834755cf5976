"""Make the axes of a layout from the ranks of a process group that exists."""

import torch
import torch.distributed as dist

from api_schemas import AxisName, Layout
from worker.mesh.axis import Axis


def make_axis(layout: Layout, name: AxisName, rank: int, device: torch.device) -> Axis:
    """Return the axis through a rank. torch requires that every rank creates every group; the whole world needs none."""
    ranks, group = layout.group(name, rank), None
    if 1 < len(ranks) < layout.num_ranks:
        made = {members: dist.new_group(list(members)) for members in layout.groups(name)}
        group = made[ranks]
    return Axis(name, len(ranks), ranks.index(rank), device, group)
