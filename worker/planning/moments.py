"""Extrapolate a step's peak from two numbers of blocks and of sequences to any, through every moment and not the peaks.

The peak moves to another moment as blocks are added, so a line through two peaks is too low, by up to 18 %. Moments of the
traces are aligned op by op inside a phase, from its beginning and from its end: what happens in the first blocks and in the
last. Within the blocks between, bytes grow or shrink from block to block, so no moment there is above both ends. The line
through a phase's peaks counts where it is above all moments: the peak is convex in the number of blocks, so its line is never
too high.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from octet.api_schemas import JobSpec
from octet.api_schemas.peak import PEAK_CLASSES, Peak, PeakLine
from octet.worker.planning.curve import Moment
from octet.worker.planning.network import Found
from octet.worker.planning.trace import Trace, trace


class Moments(NamedTuple):
    """A step of one depth. moments: by their bytes at two numbers of sequences, the bytes by class at both.

    before: alive before the step. held: the bytes by class that a job reports at its update. by_class: those at the first
    number of sequences' peak. sent: at it, too, by axis, collective and dtype in one text.
    """

    moments: dict[tuple[int, int], tuple[list[int], list[int]]]
    before: int
    held: dict[str, int]
    by_class: dict[str, int]
    sent: dict[str, int]


class Tracing(NamedTuple):
    """Traces of a step with one number of sequences. blocks: of each trace. depth: of the job's rank. level: as traced."""

    blocks: tuple[int, int]
    depth: int
    traces: Sequence[Trace]
    level: str


def traces_of(
    spec: JobSpec,
    num_sequences: int,
    pipeline_rank: int = 0,
    config: Mapping[str, Any] | None = None,
    found: Found | None = None,
    num_blocks: int | None = None,
) -> Tracing:
    """Trace a step with so many sequences and two numbers of blocks, or with one of them. Raises NotTraced.

    config: of the model's folder. found: a network of transformers. One whose blocks differ is traced whole.
    """
    blocks, level = counts(spec)[0], spec.precision.storage.name
    depth = depth_of(spec, pipeline_rank) if found is None else found.depth
    if depth is None or (found is not None and depth <= blocks[1]):
        whole = trace(spec, None, num_sequences, pipeline_rank, config)
        return Tracing((1, 2), 1, [whole, whole], level)
    traced = blocks if num_blocks is None else (num_blocks,)
    of_blocks = [trace(spec, number, num_sequences, pipeline_rank, config) for number in traced]
    return Tracing(blocks, depth, of_blocks, level)


def peak_of(spec: JobSpec, tracings: Sequence[Tracing]) -> Peak:
    """Return the peak of a job's step. tracings: for each number of sequences of `counts`, or for the first; of one rank."""
    first_tracing = tracings[0]
    found = extrapolate([each.traces for each in tracings], first_tracing.blocks, first_tracing.depth)
    exchanged: dict[str, dict[str, dict[str, int]]] = {}
    for key, num_bytes in sorted(found.sent.items()):
        axis, collective, dtype = key.split()
        if num_bytes:
            exchanged.setdefault(axis, {}).setdefault(collective, {})[dtype] = num_bytes
    return Peak(
        level=first_tracing.level,
        bytes=max(first for first, _ in found.moments),
        by_class=found.by_class,
        before=found.before,
        held=found.held,
        by_micro_batch=tuple(_line(found, *both) for both in _largest(found.moments)) if len(tracings) > 1 else (),
        exchanged=exchanged,
    )


def depth_of(spec: JobSpec, pipeline_rank: int = 0) -> int | None:
    """Return the number of blocks that a rank of the pipeline holds; without one, of the model. None if blocks differ."""
    num_layers: int | None = getattr(spec.model.sizes, "num_layers", None)
    return None if num_layers is None else spec.layout.num_blocks_of(pipeline_rank, num_layers)


def counts(spec: JobSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the traced numbers of a rank's blocks, and of sequences. At ZeRO 3 the blocks at both ends differ from others."""
    size, runs = spec.batch.micro_batch_size, spec.layout.stages_per_rank
    return ((3, 4) if spec.parallelism.zero_stage == 3 else (2 * runs, 3 * runs)), (size, 2 * size)


def extrapolate(traces: Sequence[Sequence[Trace]], blocks: tuple[int, int], depth: int) -> Moments:
    """Return the step at a depth. traces: by number of sequences, then by number of blocks."""

    def at_depth(fewer: int, more: int) -> int:
        return fewer + (more - fewer) * (depth - blocks[0]) // (blocks[1] - blocks[0])

    moments: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    of_phases: list[tuple[tuple[int, int], tuple[list[int], list[int]]]] = []
    seen: set[tuple[int, ...]] = set()
    for phases in zip(*(each.phases for by_blocks in traces for each in by_blocks), strict=True):
        for aligned in _aligned(phases):
            num_bytes = tuple(moment.num_bytes for moment in aligned)
            if num_bytes not in seen:  # half of the ops allocate nothing
                seen.add(num_bytes)
                key, by_class = _at_depth(aligned, at_depth)
                moments.setdefault(key, by_class)
        of_phases.append(_at_depth([max(phase, key=lambda moment: moment.num_bytes) for phase in phases], at_depth))
    largest = max(moments, default=(0, 0))
    alive = moments[largest][0] if moments else [0] * len(PEAK_CLASSES)
    highest, of_highest = max(of_phases)
    if highest > largest:
        moments[highest] = of_highest
        alive = of_highest[0] if min(of_highest[0]) >= 0 else alive  # a line through two moments may leave less than none
    at_peak = dict(zip(PEAK_CLASSES, alive, strict=True))
    at_peak["temporary"] += max(highest, largest)[0] - sum(alive)
    (fewest, most), *_ = traces
    held = {kind: at_depth(fewer, most.held[kind]) for kind, fewer in fewest.held.items()}
    sent = {key: at_depth(fewest.sent.get(key, 0), most.sent.get(key, 0)) for key in fewest.sent | most.sent}
    return Moments(moments, at_depth(fewest.num_bytes_before, most.num_bytes_before), held, at_peak, sent)


def _aligned(phases: Sequence[Sequence[Moment]]) -> Iterator[Sequence[Moment]]:
    """Yield the moments of all traces after the same ops, counted from the phase's beginning and from its end."""
    for moments in (zip(*phases, strict=False), zip(*map(reversed, phases), strict=False)):
        yield from takewhile(lambda each: len({moment.op for moment in each}) == 1, moments)


def _at_depth(
    aligned: Sequence[Moment], at_depth: Callable[[int, int], int]
) -> tuple[tuple[int, int], tuple[list[int], list[int]]]:
    """Return a moment's bytes at both numbers of sequences, in all and by class. With one number, both are the same."""
    pairs = list(zip(aligned[::2], aligned[1::2], strict=True))
    first, *_, second = 2 * [at_depth(fewer.num_bytes, more.num_bytes) for fewer, more in pairs]
    by_class, *_, wider = 2 * [list(map(at_depth, fewer.by_class, more.by_class)) for fewer, more in pairs]
    return (first, second), (by_class, wider)


def _line(found: Moments, first: int, second: int) -> PeakLine:
    """Return a moment's line from its bytes at two numbers of sequences; the second is twice the first."""
    by_class = tuple((2 * narrow - wide, wide - narrow) for narrow, wide in zip(*found.moments[first, second], strict=True))
    return PeakLine(base=2 * first - second, growth=second - first, by_class=by_class)


def _largest(moments: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the moments, as bytes at 1 and 2, whose lines are above all others somewhere from 0 on."""
    at, steeper = 0.0, {(2 * first - second, second - first) for first, second in moments}
    while steeper:
        base, growth = max(steeper, key=lambda line: (line[0] + at * line[1], line[1]))
        yield base + growth, base + 2 * growth
        steeper = {line for line in steeper if line[1] > growth}
        at = min(((base - line[0]) / (line[1] - growth) for line in steeper), default=at)
