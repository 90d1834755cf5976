"""Copies of a checkpoint's tensors in host memory, made while the device computes the next step.

On CUDA they are made in a stream of their own, into pinned memory that is kept from one checkpoint to the next. The training
thread waits for nothing: the device changes no tensor before it is copied, which is when the next step has its
gradients. What a forward pass may change, small tensors (amaxes, counts) and buffers, is copied in the stream of the steps.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from octet.worker.fp8.stored import PARTS

SMALL_BYTES = 1 << 16
"""A device takes less time to copy so much to the host than to change streams."""
Copy = tuple[Tensor, Tensor]
"""A tensor of the host, and the one that it is to equal."""


class Stream(Protocol):
    """The stream in which large copies are made."""

    def start(self, copies: list[Copy]) -> None:
        """Copy the tensors as they are after all work that was issued to the device so far."""

    def hold_back(self) -> None:
        """Let work that is issued from now on wait for the copies. The host does not wait."""

    def wait(self) -> None:
        """Wait for the copies, and for all that was begun before them. Any thread may call it."""


class SideStream:
    """A stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._made = device, torch.cuda.Stream(device), torch.cuda.Event()

    def start(self, copies: list[Copy]) -> None:
        """Copy in this stream, after the work of the present one."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for host, tensor in copies:
                host.copy_(tensor, non_blocking=True)
        self._made.record(self._stream)

    def hold_back(self) -> None:
        """Let the present stream wait."""
        torch.cuda.current_stream(self._device).wait_event(self._made)

    def wait(self) -> None:
        """Wait on the host. What the other stream had to do before is done then, too."""
        self._made.synchronize()


class Immediate:
    """No stream: tensors of the host are copied at once."""

    def start(self, copies: list[Copy]) -> None:
        """Copy."""
        for host, tensor in copies:
            host.copy_(tensor)

    def hold_back(self) -> None:
        """Return: it is done."""

    def wait(self) -> None:
        """Return: it is done."""


def stream_of(tensors: Iterable[Tensor]) -> Stream:
    """Return what copies these tensors to the host. Those on a device are all on one."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return Immediate() if device is None else SideStream(device)


class HostCopies:
    """Host memory for copies of tensors, kept from one checkpoint to the next.

    It is pinned where tensors come from CUDA; to get it would take longer than the copy.
    """

    def __init__(self) -> None:
        self._changed_by_passes: frozenset[str] = frozenset()
        self._held: dict[str, Tensor] = {}
        self._stream: Stream | None = None
        self._read: list[Copy] = []
        """Tensors that the stream still reads: their memory must not be reused before `hold_back`."""

    def copy_buffers_at_once(self, model: nn.Module) -> None:
        """Copy the buffers of a checkpoint's model in the stream of the steps, but for parts of converted weights."""
        names = (name for name, _ in model.named_buffers() if name.rpartition(".")[2] not in PARTS)
        self._changed_by_passes = frozenset(f"/model/{name}" for name in names)

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy tensors, by path. They overwrite the copies before. Call `hold_back` before tensors change."""
        self.hold_back()
        if self._stream is None and tensors:
            self._stream = stream_of(tensors.values())
        copies = {path: (self._room_for(path, tensor), tensor.detach()) for path, tensor in tensors.items()}
        self._held = {path: host for path, (host, _) in copies.items()}
        for path, (host, tensor) in copies.items():
            if tensor.nbytes <= SMALL_BYTES or path in self._changed_by_passes:
                host.copy_(tensor, non_blocking=True)
            else:
                self._read.append((host, tensor))
        if self._stream is not None:
            self._stream.start(self._read)
        return self._held

    def hold_back(self) -> None:
        """Let the device change what was copied, from now on and when it is copied. The host does not wait."""
        if self._read:
            assert self._stream is not None
            self._stream.hold_back()
            self._read = []

    def wait(self) -> None:
        """Wait until the copies have arrived. Any thread may call it."""
        if self._stream is not None:
            self._stream.wait()

    def _room_for(self, path: str, tensor: Tensor) -> Tensor:
        held = self._held.get(path)
        if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return held
