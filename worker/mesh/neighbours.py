"""Tensors from one rank of an axis to another, and the waits of a library that sends and receives by itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from octet.worker.mesh.axis import Axis
from octet.worker.mesh.waits import Call

_MAX_DIMS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def send(axis: Axis, tensor: Tensor, to: int) -> None:
    """Send a tensor to a rank of the axis, which receives it meanwhile."""
    tensor = tensor.contiguous()
    with axis.waits.call("send", axis.name, tensor.nbytes):
        dist.send(tensor, group_dst=to, group=axis.group)
    count_sent(axis, tensor)


def receive(axis: Axis, into: Tensor, source: int) -> Tensor:
    """Receive a tensor of the same shape and dtype from a rank of the axis."""
    with axis.waits.call("receive", axis.name, into.nbytes):
        dist.recv(into, group_src=source, group=axis.group)
    return into


def send_described(axis: Axis, tensor: Tensor, to: int) -> None:
    """Send a tensor to a rank of the axis that does not know its shape and dtype. At most 8 dimensions, of floats."""
    sizes = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
    send(axis, torch.tensor([tensor.dim(), _DTYPES.index(tensor.dtype), *sizes], device=axis.device), to)
    send(axis, tensor, to)


def receive_described(axis: Axis, source: int) -> Tensor:
    """Receive what `send_described` sends."""
    header = torch.empty(2 + _MAX_DIMS, dtype=torch.int64, device=axis.device)
    num_dims, dtype, *sizes = receive(axis, header, source).tolist()
    return receive(axis, torch.empty(sizes[:num_dims], dtype=_DTYPES[dtype], device=axis.device), source)


def swap(axis: Axis, tensor: Tensor, peer: int) -> Tensor:
    """Send a tensor to a rank of the axis and return what that rank has sent: same shape and dtype."""
    tensor, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.isend, tensor, group=axis.group, group_peer=peer),
        dist.P2POp(dist.irecv, received, group=axis.group, group_peer=peer),
    ]
    with axis.waits.call("swap", axis.name, tensor.nbytes):
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    count_sent(axis, tensor)
    return received


def count_sent(axis: Axis, tensor: Tensor) -> None:
    """Count the bytes of a tensor that this rank sends to one other."""
    axis.count_sent("send", tensor.dtype, tensor.nbytes)


class ForeignWaits:
    """The waits of a library that meets the axis' other ranks between computations, and tells nobody when.

    All that is not inside `computing` counts as a wait, so that a rank that hangs is found, and as the others' fault when it
    fails.
    """

    def __init__(self, axis: Axis, name: str) -> None:
        """name: of what the ranks wait for, in messages."""
        self._axis, self._name = axis, name
        self._call: Call | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around all of the library's work. A RuntimeError of its communication becomes CollectiveFailed."""
        self._begin()
        try:
            yield
        except BaseException as error:
            if self._call is not None:
                self._call.__exit__(type(error), error, error.__traceback__)
            raise
        self._end()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around what this rank computes. An error inside is this rank's own."""
        self._end()
        yield
        self._begin()

    def _begin(self) -> None:
        self._call = self._axis.waits.call(self._name, self._axis.name)
        self._call.__enter__()

    def _end(self) -> None:
        assert self._call is not None
        self._call.__exit__(None, None, None)
        self._call = None
