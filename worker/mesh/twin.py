"""A second communicator of an axis, for collectives that need no common order with those of the first."""

import torch.distributed as dist

from worker.mesh.axis import Axis


def twin_of(axis: Axis) -> Axis:
    """Return an axis of the same ranks, whose bytes count in the first one's. All ranks of the axis call it together."""
    if axis.size == 1:
        return axis
    group = dist.new_group(dist.get_process_group_ranks(axis._group), use_local_synchronization=True)
    twin = Axis(axis.name, axis.size, axis.rank, axis.device, group)
    twin.sent_bytes, twin.waits = axis.sent_bytes, axis.waits
    return twin
