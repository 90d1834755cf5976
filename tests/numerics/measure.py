"""Measures for numerics tests, and the data that can fail them.

Gaussian data cannot see a wrong granularity, and a whole-tensor error hides a ruined tile: so each tile of the data has its
own magnitude, and quality is measured per tile. A failure names the worst tile and both values there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExtraFields_Allocation
from torch.autograd.profiler import profile

TILE = 128


def mixed_magnitudes(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    """Gaussian values whose 128×128 tiles each have their own magnitude between 1e-3 and 1e3."""
    generator = torch.Generator().manual_seed(seed)
    tiles = torch.rand(-(-num_rows // TILE), -(-num_columns // TILE), generator=generator) * 6 - 3
    magnitude = (10.0**tiles).repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    return torch.randn(num_rows, num_columns, generator=generator) * magnitude[:num_rows, :num_columns]


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    """Signal-to-quantization-noise ratio of the whole tensor in dB."""
    noise = (actual.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def assert_sqnr(actual: Tensor, expected: Tensor, min_db: float, tile: tuple[int, int] = (TILE, TILE)) -> None:
    """Every tile of `actual` has at least `min_db` against `expected` (matrices)."""
    assert actual.shape == expected.shape, f"shape is {tuple(actual.shape)}; expected {tuple(expected.shape)}"
    worst_db, worst = float("inf"), (slice(0), slice(0))
    for row in range(0, expected.shape[0], tile[0]):
        for column in range(0, expected.shape[1], tile[1]):
            part = (slice(row, row + tile[0]), slice(column, column + tile[1]))
            db = sqnr_db(actual[part], expected[part])
            if not db >= worst_db:  # a NaN is the worst
                worst_db, worst = db, part
    if worst_db >= min_db:
        return
    error = (actual[worst] - expected[worst]).abs().nan_to_num(torch.inf)
    place = divmod(int(error.argmax()), error.shape[1])
    raise AssertionError(
        f"tile at {(worst[0].start, worst[1].start)} has {worst_db:.2f} dB; needs {min_db:.2f} dB. Whole tensor: "
        f"{sqnr_db(actual, expected):.2f} dB. Largest difference in the tile at {place}: "
        f"got {float(actual[worst][place])!r}, expected {float(expected[worst][place])!r}."
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the L2 norm."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that torch's CPU allocator gave during a call and held at a time.

    What it gave before does not count when it is freed during the call: garbage of an earlier test goes whenever it pleases
    the collector, and took its bytes off the peak.
    """
    with profile(profile_memory=True) as profiled:
        function()
    peak, held = 0, dict[int, int]()
    num_bytes = 0
    for event in allocations(profiled):
        if event.alloc_size > 0:
            held[event.ptr] = event.alloc_size
            num_bytes += event.alloc_size
        else:
            num_bytes -= held.pop(event.ptr, 0)
        peak = max(peak, num_bytes)
    return peak


def allocations(profiled: profile) -> list[Any]:
    """The allocator's events in the order of time: ptr, and alloc_size in bytes, negative where the block was freed."""
    assert profiled.kineto_results is not None
    waiting, found = list(profiled.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if isinstance(event.extra_fields, _ExtraFields_Allocation):
            found.append(event)
    return [event.extra_fields for event in sorted(found, key=lambda event: event.start_time_ns)]
