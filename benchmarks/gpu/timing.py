"""Time work on a device: CUDA events, medians, several sets of inputs. On a CPU, time by the processor's clock.

The host takes longer to enqueue a few small kernels than the device takes to run them. Before each timed call, the device
therefore gets copies that last longer than the host needs. The events then time the device's work alone; the host's time is
kept separately.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

FILLER_BYTES = 1 << 29
LONGEST_FILLER_S = 0.25

Mark = torch.cuda.Event | float
"""A moment on a device or on the host."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call on the device, and of the host to enqueue it. spread: quartile distance over the median."""

    median_s: float
    host_s: float
    spread: float

    def __str__(self) -> str:
        return f"{self.median_s * 1e3:.3g} ms ± {self.spread:.0%}"


class Timer:
    """Times calls on one device."""

    def __init__(self, device: torch.device, *, repeats: int = 20, warmup: int = 5) -> None:
        self.device, self.repeats, self.warmup = device, repeats, warmup
        self._filler: tuple[torch.Tensor, torch.Tensor] | None = None
        self._filler_s = 0.0

    def measure(self, call: Callable[[int], object], num_sets: int = 1) -> Timing:
        """Time a call. call: takes the number of the input set to use; the sets alternate."""
        for number in range(max(self.warmup, num_sets)):
            call(number % num_sets)
        self.synchronize()
        began = time.perf_counter()
        call(0)
        host_s = time.perf_counter() - began
        self.synchronize()
        num_copies = self._copies_that_last(1.5 * host_s)
        times_s = [self._once(call, number % num_sets, num_copies) for number in range(self.repeats)]
        return Timing(statistics.median(times_s), host_s, _spread(times_s))

    def consecutive(self, step: Callable[[], object]) -> Timing:
        """Time steps that follow one another, as in training. Here delays by the host count."""
        for _ in range(self.warmup):
            step()
        self.synchronize()
        marks = [self._mark()]
        for _ in range(self.repeats):
            step()
            marks.append(self._mark())
        self.synchronize()
        times_s = [_between_s(*pair) for pair in pairwise(marks)]
        return Timing(statistics.median(times_s), 0.0, _spread(times_s))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Free the memory of the copies, and all memory that nothing refers to."""
        self._filler = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _once(self, call: Callable[[int], object], number: int, num_copies: int) -> float:
        for _ in range(num_copies):
            assert self._filler is not None
            self._filler[0].copy_(self._filler[1])
        began = self._mark()
        call(number)
        ended = self._mark()
        self.synchronize()
        return _between_s(began, ended)

    def _copies_that_last(self, seconds: float) -> int:
        if self.device.type != "cuda":
            return 0
        if self._filler is None:
            self._filler = (
                torch.empty(FILLER_BYTES, dtype=torch.uint8, device=self.device),
                torch.randint(0, 256, (FILLER_BYTES,), dtype=torch.uint8, device=self.device),
            )
            target, source = self._filler
            self._filler_s = min(self._once(lambda _: target.copy_(source), 0, 0) for _ in range(5))
        return math.ceil(min(seconds, LONGEST_FILLER_S) / self._filler_s) + 1

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between_s(began: Mark, ended: Mark) -> float:
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        return began.elapsed_time(ended) / 1e3
    assert isinstance(began, float)
    assert isinstance(ended, float)
    return ended - began


def _spread(times_s: list[float]) -> float:
    if len(times_s) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times_s, n=4)
    return (high - low) / middle
