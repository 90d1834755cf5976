"""A sum of which each rank of an axis receives its share, in one order of addition on every backend."""

import torch
from torch import Tensor

from worker.mesh.axis import Axis


def sum_shares(parts_RS: Tensor, axis: Axis) -> Tensor:
    """Add up all ranks' parts of this rank's share, in fp32 and in the order of the ranks: (S), in the dtype of the parts.

    parts_RS: this rank's parts of all shares, by the rank that owns the share. All ranks call it together.
    """
    received_RS = axis.start_exchange(parts_RS).wait()
    total_S = received_RS[0].to(torch.float32, copy=True)
    for rank in range(1, axis.size):
        total_S += received_RS[rank]
    return total_S.to(parts_RS.dtype)
