"""The collective that a rank waits in. Each collective sets it while it blocks; other threads may read it at any time."""

import threading
import time
from collections import Counter, deque
from types import TracebackType

import torch

from octet.worker.common.errors import CollectiveFailed
from octet.worker.metrics.readback import Mark

DEVICE = "device"
"""In place of an axis: the rank waits for its own device, which may wait for other ranks."""
NUM_BLOCKS_KEPT = 256
_OF_THIS_RANK = (torch.OutOfMemoryError, torch.AcceleratorError)


class Waits:
    """The collectives of one rank: which one it is in, how many it has started, when it waited."""

    def __init__(self, device: torch.device | None = None) -> None:
        """device: of the collectives. With one, the times of waiting are kept until `take_spans`."""
        self.device = device
        self.step = 0
        """Optimizer steps that this rank has taken."""
        self.current: Call | None = None
        self.failed: Call | None = None
        """The collective that failed."""
        self.num_started: Counter[str] = Counter()
        """Collectives that this rank has started, by axis."""
        self.num_blocks = 0
        """Blocks whose weights this rank has started to gather (ZeRO stage 3)."""
        self.last_blocks: deque[int] = deque(maxlen=NUM_BLOCKS_KEPT)
        """The newest of these blocks, each by its index in the model."""
        self.last_busy_s = 0.0
        """Seconds of the last step that was read, without the waits in it."""
        self._spans: list[tuple[Mark, Mark]] = []
        self._busy_s, self._num_busy = 0.0, 0
        self._lock = threading.Lock()

    def mark(self) -> Mark | None:
        """Mark this moment in the work of the device. None without a device, and inside the capture of a CUDA graph."""
        device = self.device
        is_captured = device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return None if device is None or is_captured else Mark(device)

    def add_span(self, began: Mark, ended: Mark) -> None:
        """Keep the time of a wait."""
        self._spans.append((began, ended))

    def take_spans(self) -> list[tuple[Mark, Mark]]:
        """Return the waits since the last call, each as its begin and its end in the work of the device."""
        spans, self._spans = self._spans, []
        return spans

    def add_busy(self, seconds: float) -> None:
        """Take the time of a step without the waits in it."""
        self.last_busy_s = seconds
        with self._lock:
            self._busy_s, self._num_busy = self._busy_s + seconds, self._num_busy + 1

    def take_mean_busy(self) -> float | None:
        """Return the mean of the times that were added since the last call; None without any."""
        with self._lock:
            total_s, count = self._busy_s, self._num_busy
            self._busy_s, self._num_busy = 0.0, 0
        return total_s / count if count else None

    def note_block(self, index: int) -> None:
        """Note that this rank starts to gather the weights of a block."""
        self.num_blocks += 1
        self.last_blocks.append(index)

    def call(self, collective: str, axis: str, num_bytes: int = 0) -> "Call":
        """Count a collective of so many bytes. The result is a context manager for each part of it that may block."""
        self.num_started[axis] += 1
        return Call(self, f"{collective} of {num_bytes:,} bytes" if num_bytes else collective, axis, self.num_started[axis])


class Call:
    """One collective of a rank. Inside, the rank waits for the others; an error of the backend becomes CollectiveFailed."""

    def __init__(self, waits: Waits, collective: str, axis: str, number: int) -> None:
        """collective: its name and size. number: of this rank's collectives on the axis, from 1."""
        self.collective, self.axis, self.number = collective, axis, number
        self.since_s = 0.0
        """When the rank began to wait, by `time.monotonic`."""
        self._waits = waits
        self._began: Mark | None = None

    def __str__(self) -> str:
        return f"{self.collective} over {self.axis} (number {self.number} there)"

    def __enter__(self) -> None:
        self.since_s = time.monotonic()
        self._waits.current = self
        self._began = None if self.axis == DEVICE else self._waits.mark()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._waits.current = None
        if self._began is not None and (ended := self._waits.mark()) is not None:
            self._waits.add_span(self._began, ended)
        if isinstance(error, RuntimeError) and self.axis != DEVICE and not isinstance(error, _OF_THIS_RANK):
            self._waits.failed = self
            raise CollectiveFailed(f"{self} failed: {error}") from error
