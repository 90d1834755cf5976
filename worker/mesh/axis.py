"""One group of ranks and its collectives. A group of one needs no process group: every collective is the identity.

Codes travel as bytes because gloo refuses float8. Each collective counts the bytes that it sends; nothing else counts them.

Shape suffixes: R ranks of the axis, S elements of one rank's share.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from worker.mesh.pending import Pending
from worker.mesh.waits import Waits


class Axis:
    """The ranks on one axis of a mesh, as one of them sees it. `rank` is its index on the axis, from 0."""

    def __init__(self, name: str, size: int, rank: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """group: the ranks of this axis; None for the whole world or for a single rank."""
        self.name, self.size, self.rank, self.device, self.waits = name, size, rank, device, Waits()
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        """Bytes of tensors that this rank sent, by collective and by the dtype of the values; padding counts."""
        self._group = group

    @property
    def is_first(self) -> bool:
        """True if this rank is the first on the axis."""
        return self.rank == 0

    def sum(self, *numbers: float) -> list[float]:
        """Sum each number over the ranks, in float64."""
        if self.size == 1:
            return list(numbers)
        return list(self.sum_(torch.tensor(numbers, dtype=torch.float64, device=self.device)).tolist())

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks, in the order that the backend chooses."""
        if self.size > 1:
            with self.waits.call("sum", self.name, tensor.nbytes):
                dist.all_reduce(tensor, group=self._group)
            # Each rank sends all shares but its own twice: first to the ranks that sum them, then the sum to all others.
            self._count("sum", tensor.dtype, 2 * tensor.nbytes * (self.size - 1) // self.size)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its maximum over the ranks. NaN counts as infinity, so all ranks get the same result."""
        tensor.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        if self.size > 1:
            with self.waits.call("max", self.name, tensor.nbytes):
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
            self._count("max", tensor.dtype, 2 * tensor.nbytes * (self.size - 1) // self.size)
        return tensor

    def start_exchange(self, parts_RS: Tensor) -> Pending:
        """Start to send row r to rank r. The result: received rows, by rank. All ranks start collectives in one order."""
        if self.size == 1:
            return Pending(parts_RS)
        received_RS = torch.empty_like(parts_RS)
        received_bytes, sent_bytes = received_RS.view(torch.uint8), parts_RS.view(torch.uint8)
        with (call := self.waits.call("exchange", self.name, parts_RS.nbytes)):
            work = dist.all_to_all_single(received_bytes, sent_bytes, group=self._group, async_op=True)
        self._count("exchange", parts_RS.dtype, parts_RS.nbytes * (self.size - 1) // self.size)
        return Pending(received_RS, work, parts_RS, call)

    def start_gather(self, own_S: Tensor, into_RS: Tensor | None = None) -> Pending:
        """Start to gather all ranks' shares, by rank: (R, S), into the memory if given. All start collectives in one order."""
        if self.size == 1:
            return Pending(own_S.unsqueeze(0))
        own_S = own_S.contiguous()
        gathered_RS = own_S.new_empty((self.size, *own_S.shape)) if into_RS is None else into_RS
        gathered_bytes, own_bytes = list(gathered_RS.view(torch.uint8)), own_S.view(torch.uint8)
        with (call := self.waits.call("gather", self.name, own_S.nbytes)):
            work = dist.all_gather(gathered_bytes, own_bytes, group=self._group, async_op=True)
        self._count("gather", own_S.dtype, own_S.nbytes * (self.size - 1))
        return Pending(gathered_RS, work, own_S, call)

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by the first rank's tensor, bit for bit."""
        if self.size > 1:
            first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
            with self.waits.call("broadcast", self.name, tensor.nbytes):
                dist.broadcast(tensor.detach().view(-1).view(torch.uint8), src=first, group=self._group)
            self._count("broadcast", tensor.dtype, tensor.nbytes if self.is_first else 0)
        return tensor

    def _count(self, collective: str, dtype: torch.dtype, num_bytes: int) -> None:
        self.sent_bytes[collective, str(dtype).removeprefix("torch.")] += num_bytes
