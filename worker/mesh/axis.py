"""One group of ranks and its collectives. A group of one needs no process group: every collective is the identity.

Codes travel as bytes because gloo refuses float8. Each collective counts the bytes that it sends; nothing else counts them.

Shape suffixes: R ranks of the axis, S elements of one rank's share.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from octet.worker.mesh.waits import Call, Waits

# torch 2.13 renames it, and warns of the old name.
_gather_into_one = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class Pending:
    """A collective that is under way. It keeps the tensors alive that the backend still reads."""

    def __init__(
        self, result: Tensor, work: dist.Work | None = None, read: Tensor | None = None, call: Call | None = None
    ) -> None:
        """read: the tensor that is being sent. call: the context in which this rank waits."""
        self._result, self._work, self._read, self._call = result, work, read, call

    def wait(self) -> Tensor:
        """Wait, on CUDA only the current stream, and return the result."""
        if self._work is not None:
            with self._call or nullcontext():
                self._work.wait()
        self._work = self._read = None
        return self._result


class Axis:
    """The ranks on one axis of a mesh, as one of them sees it. `rank` is its index on the axis, from 0."""

    def __init__(self, name: str, size: int, rank: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """group: the ranks of this axis; None for the whole world or for a single rank."""
        self.name, self.size, self.rank, self.device, self.waits = name, size, rank, device, Waits()
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        """Bytes of tensors that this rank sent, by collective and by the dtype of the values; padding counts."""
        self.group = group
        self.exchange_group: dist.ProcessGroup | None = None
        """The communicator of exchanges, if they have one of their own (`bound_exchange`)."""

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
                dist.all_reduce(tensor, group=self.group)
            # Each rank sends all shares but its own twice: first to the ranks that sum them, then the sum to all others.
            self.count_sent("sum", tensor.dtype, 2 * tensor.nbytes * (self.size - 1) // self.size)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its maximum over the ranks. NaN counts as infinity, so all ranks get the same result."""
        tensor.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        if self.size > 1:
            with self.waits.call("max", self.name, tensor.nbytes):
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
            self.count_sent("max", tensor.dtype, 2 * tensor.nbytes * (self.size - 1) // self.size)
        return tensor

    def start_exchange(self, parts_RS: Tensor) -> Pending:
        """Start to send row r to rank r. The result holds the received rows, by rank.

        All ranks start collectives in one order.
        """
        if self.size == 1:
            return Pending(parts_RS)
        received_RS = torch.empty_like(parts_RS)
        received_bytes, sent_bytes = received_RS.view(torch.uint8), parts_RS.view(torch.uint8)
        with (call := self.waits.call("exchange", self.name, parts_RS.nbytes)):
            work = dist.all_to_all_single(received_bytes, sent_bytes, group=self.exchange_group or self.group, async_op=True)
        self.count_sent("exchange", parts_RS.dtype, parts_RS.nbytes * (self.size - 1) // self.size)
        return Pending(received_RS, work, parts_RS, call)

    def exchange_rows(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """Send consecutive rows of a matrix to each rank, as many as `num_sent` says. Returns the received ones, by rank.

        num_received: rows that each rank sends here. All ranks call it together, with rows of one width and dtype.
        """
        if self.size == 1:
            return rows
        rows = rows.contiguous()
        received = rows.new_empty(sum(num_received), *rows.shape[1:])
        sent_bytes, received_bytes = rows.view(torch.uint8), received.view(torch.uint8)
        with self.waits.call("exchange", self.name, rows.nbytes):
            dist.all_to_all_single(received_bytes, sent_bytes, list(num_received), list(num_sent), group=self.group)
        row_bytes = rows[0].nbytes if len(rows) else 0
        self.count_sent("exchange", rows.dtype, row_bytes * (len(rows) - num_sent[self.rank]))
        return received

    def start_gather(self, own_S: Tensor, into_RS: Tensor | None = None) -> Pending:
        """Start to gather all ranks' shares. The result: (R, S), by rank; into_RS: memory for it.

        All ranks start collectives in one order.
        """
        if self.size == 1:
            return Pending(own_S.unsqueeze(0))
        own_S = own_S.contiguous()
        gathered_RS = own_S.new_empty((self.size, *own_S.shape)) if into_RS is None else into_RS
        # One tensor, and not a list of its rows: for a list NCCL gathers into memory of its own, and copies.
        gathered_bytes, own_bytes = gathered_RS.view(-1).view(torch.uint8), own_S.view(-1).view(torch.uint8)
        with (call := self.waits.call("gather", self.name, own_S.nbytes)):
            work = _gather_into_one(gathered_bytes, own_bytes, group=self.group, async_op=True)
        self.count_sent("gather", own_S.dtype, own_S.nbytes * (self.size - 1))
        return Pending(gathered_RS, work, own_S, call)

    def gather_texts(self, text: str) -> list[str]:
        """Return every rank's text, by rank. All ranks call it together."""
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.device)
        length = int(self.max_(torch.tensor(float(own.numel()), dtype=torch.float64, device=self.device)))
        padded = torch.full((length,), ord(" "), dtype=torch.uint8, device=self.device)
        padded[: own.numel()] = own
        return [row.numpy().tobytes().decode() for row in self.start_gather(padded).wait().cpu()]

    def sum_shares(self, parts_RS: Tensor) -> Tensor:
        """Add up all ranks' parts of this rank's share: (S), in the dtype of the parts. All ranks call it together.

        The sum is in fp32 and in the order of the ranks, so it has the same bits on every backend.
        parts_RS: this rank's parts of all shares, by the rank that owns the share.
        """
        received_RS = self.start_exchange(parts_RS).wait()
        total_S = received_RS[0].to(torch.float32, copy=True)
        for rank in range(1, self.size):
            total_S += received_RS[rank]
        return total_S.to(parts_RS.dtype)

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by the first rank's tensor, bit for bit."""
        if self.size > 1:
            first = dist.get_global_rank(self.group, 0) if self.group is not None else 0
            with self.waits.call("broadcast", self.name, tensor.nbytes):
                dist.broadcast(tensor.detach().view(-1).view(torch.uint8), src=first, group=self.group)
            self.count_sent("broadcast", tensor.dtype, tensor.nbytes if self.is_first else 0)
        return tensor

    def count_sent(self, collective: str, dtype: torch.dtype, num_bytes: int) -> None:
        """Count bytes that this rank sends, in values of the dtype."""
        self.sent_bytes[collective, str(dtype).removeprefix("torch.")] += num_bytes
