"""Extrapolate a step's peak from two numbers of blocks and of sequences to any, through every moment and not the peaks.

The peak moves to another moment as blocks are added, so a line through two peaks is too low, by up to 18 %. Moments of the
traces are aligned op by op inside a phase, from its beginning and from its end: what happens in the first blocks and in the
last. Within the blocks between, bytes grow or shrink from block to block, so no moment there is above both ends. The line
through each phase's peaks counts too: the peak is convex in the number of blocks, so its line is never too high.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from octet.api_schemas import JobSpec
from octet.api_schemas.plan import PEAK_CLASSES, Peak, PeakLine
from octet.worker.planning.curve import Moment
from octet.worker.planning.network import Found
from octet.worker.planning.trace import Trace, trace

NEGLIGIBLE = 1.001


class Moments(NamedTuple):
    """A step of one depth. moments: bytes of each at two numbers of sequences. before: alive before the step.

    held: the bytes by class that a job reports at its update. by_class: those at the first number of sequences' peak.
    sent: at it, too, by axis, collective and dtype in one text.
    """

    moments: set[tuple[int, int]]
    before: int
    held: dict[str, int]
    by_class: dict[str, int]
    sent: dict[str, int]


class Tracing(NamedTuple):
    """Traces of a step with one number of sequences. blocks: of each trace. depth: of the job's rank."""

    blocks: tuple[int, int]
    depth: int
    traces: Sequence[Trace]


def traces_of(
    spec: JobSpec,
    num_sequences: int,
    pipeline_rank: int = 0,
    config: Mapping[str, Any] | None = None,
    found: Found | None = None,
) -> Tracing:
    """Trace a step with so many sequences and two numbers of blocks. Raises NotTraced.

    config: of the model's folder. found: a network of transformers. One whose blocks differ is traced whole.
    """
    blocks, _ = counts(spec)
    depth = depth_of(spec, pipeline_rank) if found is None else found.depth
    if depth is None or (found is not None and depth <= blocks[1]):
        return Tracing((1, 2), 1, [trace(spec, None, num_sequences, pipeline_rank, config)] * 2)
    return Tracing(blocks, depth, [trace(spec, number, num_sequences, pipeline_rank, config) for number in blocks])


def peak_of(spec: JobSpec, tracings: Sequence[Tracing]) -> Peak:
    """Return the peak of a job's step. tracings: for each number of sequences of `counts`, of the same rank."""
    first_tracing = tracings[0]
    found = extrapolate([each.traces for each in tracings], first_tracing.blocks, first_tracing.depth)
    peak = max(first for first, _ in found.moments)
    lines = _largest({(2 * first - second, second - first) for first, second in found.moments})
    by_micro_batch = tuple(PeakLine(base=base, growth=growth) for base, growth in lines)
    exchanged: dict[str, dict[str, dict[str, int]]] = {}
    for key, num_bytes in sorted(found.sent.items()):
        axis, collective, dtype = key.split()
        if num_bytes:
            exchanged.setdefault(axis, {}).setdefault(collective, {})[dtype] = num_bytes
    return Peak(
        bytes=peak,
        by_class=found.by_class,
        before=found.before,
        held=found.held,
        by_micro_batch=by_micro_batch,
        exchanged=exchanged,
    )


def depth_of(spec: JobSpec, pipeline_rank: int = 0) -> int | None:
    """Return the number of blocks that a rank of the pipeline holds; without one, of the model. None if blocks differ."""
    num_layers: int | None = getattr(spec.model.sizes, "num_layers", None)
    return None if num_layers is None else spec.layout.num_blocks_of(pipeline_rank, num_layers)


def counts(spec: JobSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the traced numbers of a rank's blocks, and of sequences. At ZeRO 3 the blocks at both ends differ from others."""
    size, runs = spec.batch.micro_batch_size, spec.layout.stages_per_rank
    return ((4, 5) if spec.parallelism.zero_stage == 3 else (2 * runs, 3 * runs)), (size, 2 * size)


def extrapolate(traces: Sequence[Sequence[Trace]], blocks: tuple[int, int], depth: int) -> Moments:
    """Return the step at a depth. traces: by number of sequences, then by number of blocks."""

    def at_depth(fewer: int, more: int) -> int:
        return fewer + (more - fewer) * (depth - blocks[0]) // (blocks[1] - blocks[0])

    moments: set[tuple[int, int]] = set()
    largest: tuple[int, list[int]] | None = None
    peak = 0
    for phases in zip(*(each.phases for by_blocks in traces for each in by_blocks), strict=True):
        for fewer, more, *wider in _aligned(phases):
            first = at_depth(fewer.num_bytes, more.num_bytes)
            moments.add((first, at_depth(*(each.num_bytes for each in wider)) if wider else first))
            peak = max(peak, first)
            if largest is None or first > largest[0]:
                by_class = list(map(at_depth, fewer.by_class, more.by_class))
                largest = (first, by_class) if min(by_class) >= 0 else largest
    (fewest, most), *_ = traces
    held = {kind: at_depth(num_bytes, most.held[kind]) for kind, num_bytes in fewest.held.items()}
    at_peak = dict(zip(PEAK_CLASSES, [0] * len(PEAK_CLASSES) if largest is None else largest[1], strict=True))
    at_peak["temporary"] += peak - sum(at_peak.values())
    sent = {key: at_depth(fewest.sent.get(key, 0), most.sent.get(key, 0)) for key in fewest.sent | most.sent}
    return Moments(moments, at_depth(fewest.num_bytes_before, most.num_bytes_before), held, at_peak, sent)


def _aligned(phases: Sequence[Sequence[Moment]]) -> Iterator[Sequence[Moment]]:
    """Yield the moments of all traces after the same ops, counted from the phase's beginning and its end, and their peaks."""
    for moments in (zip(*phases, strict=False), zip(*map(reversed, phases), strict=False)):
        yield from takewhile(lambda each: len({moment.op for moment in each}) == 1, moments)
    yield [max(phase, key=lambda moment: moment.num_bytes) for phase in phases]


def _largest(lines: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the lines, as (bytes at 0, growth), that no steeper line is at or above everywhere, give or take 0.1 %."""
    kept: list[tuple[int, int]] = []
    for base, growth in sorted(lines, key=lambda line: (-line[1], -line[0])):
        if not kept or base > kept[-1][0] * NEGLIGIBLE:
            kept.append((base, growth))
    return kept
