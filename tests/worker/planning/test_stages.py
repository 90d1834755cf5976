"""A pipeline's step is put together from the passes of a shorter one."""

import pytest

from octet.api_schemas import Layout
from octet.worker.planning.curve import Moment
from octet.worker.planning.stages import Pass, composed, order


def written(layout: Layout, rank: int, num_micro_batches: int) -> str:
    return " ".join(f"{'F' if each.is_forward else 'B'}{each.run}" for each in order(layout, rank, num_micro_batches))


def test_the_order_of_passes_is_that_of_the_schedules() -> None:
    """By hand, after Narayanan et al. 2021 (arXiv 2104.04473), figures 4 and 8."""
    assert written(Layout(num_ranks=3, pipeline=3), 0, 4) == "F0 F0 F0 B0 F0 B0 B0 B0"
    assert written(Layout(num_ranks=3, pipeline=3), 2, 3) == "F0 B0 F0 B0 F0 B0"
    interleaved = Layout(num_ranks=2, pipeline=2, stages_per_rank=2)
    assert written(interleaved, 0, 4) == "F0 F0 F1 F1 F0 B1 F0 B1 F1 B0 F1 B0 B1 B1 B0 B0"
    assert written(interleaved, 1, 2) == "F0 F0 F1 B1 F1 B1 B0 B0"


def moments(start: int, *steps: int) -> list[Moment]:
    return [Moment("op", start := start + step, (start,)) for step in steps]


def test_a_longer_pipeline_has_more_micro_batches_in_flight() -> None:
    """A forward pass keeps 10 of 15 bytes, the first backward pass leaves a gradient of 3: three passes, it, and one more."""
    before, update = moments(0, 100), moments(103, 1)
    phases = [
        before,
        *(moments(100, 15, -5), moments(110, 15, -5), moments(120, 5, -12), moments(113, 15, -5)),
        *(moments(123, 2, -12), moments(113, 2, -12)),
        update,
    ]
    traced, wanted = (list(order(Layout(num_ranks=length, pipeline=length), 0, n)) for length, n in ((2, 3), (4, 8)))
    found = composed(phases, traced, wanted)
    assert max(moment.num_bytes for phase in found for moment in phase) == 100 + 3 * 10 + 3 + 15
    assert (found[0], found[-1]) == (before, update)
    with pytest.raises(ValueError, match="5 passes were traced; the schedule has 6"):
        composed(phases[:-1], [Pass(True, 0)] * 6, wanted)
