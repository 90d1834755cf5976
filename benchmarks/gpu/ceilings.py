"""Measure two rates that no kernel exceeds, in the same run: a large copy, and a large bf16 matrix product."""

from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import Timer, Timing

COPY_BYTES = 1 << 32
GEMM_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second of a copy (read plus written), and bf16 floating-point operations per second, on random data."""

    copy_bytes_per_s: float
    gemm_flops_per_s: float

    def share_of_copy(self, num_bytes: float, timing: Timing) -> float:
        """Return the bandwidth of work that must move `num_bytes`, as a share of the copy's bandwidth."""
        return num_bytes / timing.median_s / self.copy_bytes_per_s

    def __str__(self) -> str:
        return f"copy {self.copy_bytes_per_s / 1e12:.3g} TB/s, bf16 GEMM {self.gemm_flops_per_s / 1e12:.3g} TFLOP/s"


def measure_ceilings(timer: Timer, *, smoke: bool) -> Ceilings:
    """Measure both rates on random data. smoke: use a size that takes almost no time."""
    num_bytes, size = (1 << 16, 64) if smoke else (COPY_BYTES, GEMM_SIZE)
    return Ceilings(_copy_bytes_per_s(timer, num_bytes), _gemm_flops_per_s(timer, size))


def _copy_bytes_per_s(timer: Timer, num_bytes: int) -> float:
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / timer.measure(lambda _: target.copy_(source)).median_s


def _gemm_flops_per_s(timer: Timer, size: int) -> float:
    pairs = [torch.randn(2, size, size, device=timer.device).bfloat16().unbind() for _ in range(3)]
    return 2 * size**3 / timer.measure(lambda number: torch.mm(*pairs[number]), num_sets=len(pairs)).median_s
