"""Values that an accelerator still computes: they are copied to the host without a wait, and read when they have arrived."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


class HostCopy:
    """A small tensor on its way to the host. Later changes of the tensor do not change the copy."""

    def __init__(self, tensor: Tensor) -> None:
        is_cuda = tensor.device.type == "cuda"
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda)
        self._host.copy_(tensor, non_blocking=True)
        self._arrival = torch.cuda.Event() if is_cuda else None
        if self._arrival is not None:
            self._arrival.record()

    def read(self) -> Any:
        """Return the numbers as nested lists, as `Tensor.tolist` does. Waits until the device has computed them."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._host.tolist()


@dataclass(frozen=True)
class DeferredValue:
    """A value that depends on numbers on their way to the host. read: waits for them; any thread may call it."""

    read: Callable[[], Any]


@dataclass(frozen=True)
class HostNumbers:
    """Numbers that the host has read already, in place of a copy that is on its way."""

    numbers: list[float]

    def read(self) -> list[float]:
        """Return the numbers."""
        return self.numbers


class Mark:
    """A moment in the work of a device: on CUDA when it gets here in its stream, on the CPU now."""

    def __init__(self, device: torch.device) -> None:
        self._time_s = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def seconds_until(self, later: Self) -> float:
        """Seconds from this moment to a later one on the same device, which must have reached both."""
        if self._event is None or later._event is None:
            return later._time_s - self._time_s
        return float(self._event.elapsed_time(later._event)) / 1000
