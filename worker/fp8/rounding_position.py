"""The place of one parameter's gradient in the stream of random numbers by which FP8 additions are rounded."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octet.worker import kernels


@dataclass
class RoundingPosition:
    """The position of one parameter's gradient in the random stream. count: additions rounded so far on this rank.

    share, num_shares: the part of the batch that this rank accumulates, and the number of parts.
    Each part draws numbers of its own, so that the rounding errors of different ranks average out;
    with the same numbers they would add up. The count is on the gradient's device, and the host
    does not follow it, so the replay of a CUDA graph draws new numbers.
    """

    seed: int
    stream: int
    share: int = 0
    num_shares: int = 1
    _count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64, device="cpu"), compare=False, repr=False)

    @property
    def count(self) -> int:
        """The additions so far. Waits for the device."""
        return int(self._count)

    @count.setter
    def count(self, count: int) -> None:
        self._count.fill_(count)

    def with_count(self, state: Tensor, index: int) -> Tensor:
        """Return state (int64, on the host) with the count at an index, on the device that counts: the host does not wait."""
        if self._count.is_cuda:
            state = state.pin_memory().to(self._count.device, non_blocking=True)
        state[index] = self._count
        return state

    def counter_on(self, device: torch.device) -> Tensor:
        """Return the count itself, int64 (), which moves to the device of the gradients."""
        if self._count.device != device:
            self._count = self._count.to(device)
        return self._count

    def next_draw(self, device: torch.device) -> tuple[int, Tensor, int]:
        """Seed, step (int64, ()) and stream of random numbers that were never drawn before, on any rank."""
        return self.seed, self.counter_on(device).add_(1) * self.num_shares + self.share, self.stream

    def accumulate_(self, codes: Tensor, dequant_scale: Tensor, other: Tensor, alpha: float) -> None:
        """codes × dequant_scale += alpha · other, rounded with the next draw; shapes and dtypes as `kernels.accumulate_`."""
        draw, count = (self.seed, self.share, self.stream), self.counter_on(codes.device)
        kernels.accumulate_(codes, dequant_scale, other, alpha, draw, count, self.num_shares)

    def clamp_(self, codes: Tensor, dequant_scale: Tensor, low: float, high: float) -> None:
        """codes × dequant_scale clamped to low … high, rounded with the next draw where a value is beyond."""
        limit = max((abs(bound) for bound in (low, high) if abs(bound) < math.inf), default=0.0)
        draw, count = (self.seed, self.share, self.stream), self.counter_on(codes.device)
        kernels.clamp_(codes, dequant_scale, (low, high, limit), draw, count, self.num_shares)
