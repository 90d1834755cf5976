"""The measures themselves: what a peak counts."""

import torch

from tests.numerics.measure import peak_bytes

MEBI = 1 << 20


def test_the_peak_is_what_is_held_at_a_time() -> None:
    def one_after_another() -> torch.Tensor:
        for _ in range(3):
            kept = torch.empty(2 * MEBI, dtype=torch.uint8)
        return kept

    assert peak_bytes(lambda: torch.empty(MEBI, dtype=torch.uint8)) == MEBI
    assert peak_bytes(one_after_another) == 4 * MEBI
    assert peak_bytes(lambda: None) == 0


def test_what_was_there_before_takes_nothing_off_the_peak() -> None:
    """The profiler knows the blocks of an earlier call, and reports that they are freed."""
    before: list[torch.Tensor] = []
    peak_bytes(lambda: before.append(torch.empty(8 * MEBI, dtype=torch.uint8)))

    def frees_it() -> torch.Tensor:
        before.clear()
        return torch.empty(MEBI, dtype=torch.uint8)

    assert peak_bytes(frees_it) == MEBI
